"""One list of arguments, made of recipe files and flags.

The parser lets every file replace what the ones before it say. Two settings add to each other instead: one's own
callbacks join the recipe's, and adapters bring the learning rate that adapters need. An architecture is looked for
beside the file that names it, as bases are, then in the working folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_offload.cli.recipes import read
from lt_offload.resources import is_file, shipped_files, shipped_root

_CALLBACKS = "--trainer.callbacks"
_PIECES = {"lora": "lora.yaml", "adapter": "adapter.yaml"}
"""Shipped files with settings that suit a setting of the model, by that setting."""


def compose(files: Sequence[Path], args: Sequence[str]) -> list[str]:
    """Return the arguments for the parser: ``files``, later ones first in rank, then the flags ``args``, with ``=``."""
    chain = [*files]
    for setting, piece in _PIECES.items():
        chain = _with_piece(chain, args, setting, piece)
    merged = _callbacks(chain)
    return [
        *(part for file in chain for part in ("--config", str(file), *_architecture(file))),
        *([] if merged is None else [f"{_CALLBACKS}={json.dumps(merged)}"]),
        # With a plus the parser appends; without it a flag would replace the recipe's checkpoints and bars.
        *(re.sub(rf"^{_CALLBACKS}=(?!(null|\[\])?$)", f"{_CALLBACKS}+=", arg) for arg in args),
    ]


def _architecture(file: Path) -> list[str]:
    """Return the flag for the architecture that ``file`` names, if it is a path from the folder of ``file``."""
    name = _group(file, "model").get("architecture")
    if not isinstance(name, str) or name in shipped_files("configs/models", ".json"):
        return []
    beside = file.parent / name
    return [f"--model.architecture={beside}"] if is_file(beside) or is_file(beside / "config.json") else []


def _with_piece(files: Sequence[Path], args: Sequence[str], setting: str, name: str) -> list[Path]:
    """Put the shipped piece for adapters before the file that switches them on; later files override it as usual."""
    piece = shipped_root() / "configs" / name
    chain = [*files]
    for index, file in enumerate(chain):
        if _group(file, "model").get(setting) is not None:
            # The piece comes before that file, whose learning rate has to win, as those of all later files do.
            return [*chain] if file.resolve() == piece.resolve() else [*chain[:index], piece, *chain[index:]]
    if any(_switches_on(arg, setting) for arg in args):
        # A flag switches it on, so it comes behind all files: flags override it anyway.
        return [*chain, piece]
    return chain


def _switches_on(arg: str, setting: str) -> bool:
    name, _, value = arg.partition("=")
    if name == "--config":
        return is_file(value) and _group(Path(value), "model").get(setting) is not None
    flag = f"--model.{setting}"
    return name.startswith(f"{flag}.") or (name == flag and value not in ("null", ""))


def _callbacks(files: Sequence[Path]) -> list[Any] | None:
    """Return the callbacks of all ``files`` in their order; None where the parser's own rule gives the same."""
    merged: list[Any] = []
    mentions = 0
    for file in files:
        group = _group(file, "trainer")
        if "callbacks" not in group:
            continue
        callbacks = group["callbacks"]
        if not isinstance(callbacks, dict | list | str | None):
            return None  # the parser says what is wrong with it
        mentions += 1
        # null empties the list, as it does for the parser: a recipe can get rid of its bases' callbacks.
        if callbacks is None:
            merged = []
            continue
        merged += [one for one in (callbacks if isinstance(callbacks, list) else [callbacks]) if one not in merged]
    # One file's list is what the parser makes of it, and its errors name that file.
    return merged if mentions > 1 else None


def _group(file: Path, name: str) -> dict[str, Any]:
    group = read(file).get(name)
    return group if isinstance(group, dict) else {}
