"""Recipes by name or path, and the files each one builds on. Imports neither torch nor Lightning.

A recipe may say ``base: FILE`` or ``base: [FILE, FILE]``: those files come first, the recipe's keys override theirs.
A recipe may also say ``gpu: FILE``: where it runs on a GPU, that file overrides it.
Such files are looked for beside the one that names them, then among those that come with the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_offload.cli.table import VERBS
from lt_offload.errors import ConfigError
from lt_offload.nested import dotted
from lt_offload.resources import is_dir, is_file, shipped_files, shipped_root, user_path
from lt_offload.suggest import did_you_mean, nearest
from lt_offload.units import parse_bytes
from lt_offload.yaml_files import read_yaml

_TRAINS = "the verb of training is fit, and may be left out: lt-finetune RECIPE"
_ANSWERS = "a trained model answers by lt-finetune chat RUN, or lt-finetune generate RUN --prompt TEXT"
_OTHER_VERBS = {
    **dict.fromkeys(("train", "finetune", "fine-tune", "sft", "run", "start", "tune"), _TRAINS),
    **dict.fromkeys(("resume", "continue"), "a run goes on by lt-finetune RUN --resume"),
    "report": "every run has a report.html in its folder; lt-finetune compare RUN RUN puts runs side by side",
    **dict.fromkeys(("eval", "evaluate", "test"), "the loss on held-out data is told by lt-finetune validate RUN"),
    **dict.fromkeys(("infer", "inference", "predict"), _ANSWERS),
    **dict.fromkeys(("serve", "api", "webchat", "webui", "studio"), f"there is no server; {_ANSWERS}"),
    "merge": "adapters are merged into the model by lt-finetune export RUN",
    "preprocess": "what is trained on is shown by lt-finetune data RECIPE",
}
"""The equivalents of other tools' verbs."""
GROUPS = ("model", "data", "trainer")


def shipped() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return shipped_files("recipes", ".yaml")


def find(recipe: str) -> Path:
    """Return the file of ``recipe``: a path, the name of a shipped one, or a run folder; a path wins.

    Raises ``ConfigError`` if there is none; it names the closest ones.
    """
    path = user_path(recipe)
    if is_file(path):
        return path
    if is_run(path):
        return path / "config.yaml"
    known = shipped()
    # People who look at the repository type the path that they see there.
    name = recipe.removesuffix(".yaml").removeprefix("recipes/")
    if name in known:
        return known[name]
    if name in _OTHER_VERBS:
        raise ConfigError(f"there is no verb or recipe {recipe!r}; {_OTHER_VERBS[name]}")
    # A slip in a verb looks like the name of a recipe, as fit may be
    # left out. So verbs are asked more strictly than recipes.
    verbs = nearest(name, [*VERBS, "help"], cutoff=0.7, most=1)
    if verbs:
        raise ConfigError(f"there is no verb or recipe {recipe!r}; did you mean {verbs[0]}?")
    hint = did_you_mean(name, known, cutoff=0.5) or "; 'lt-finetune ls' lists the recipes that come with it"
    if is_dir(path):
        raise ConfigError(f"{recipe!r} is a folder without config.yaml, so no run; give a recipe or a run folder")
    raise ConfigError(f"there is no recipe {recipe!r}: no such file, and none of that name is shipped{hint}")


def is_run(recipe: str | Path) -> bool:
    """Return whether ``recipe`` is the folder of a run, whose settings are in ``config.yaml``."""
    path = user_path(recipe)
    return is_dir(path) and is_file(path / "config.yaml")


def chain(recipe: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """Return the files that make up ``recipe``, in the order in which they apply: bases first, the recipe last.

    ``above`` are files that build on it. Raises ``ConfigError`` if a base is missing or builds on itself.
    """
    # Only the files above count: two bases may build on one file without a circle.
    if recipe.resolve() in above:
        raise ConfigError(f"base: {recipe} builds on itself")
    bases = [file for base in _named(recipe, "base") for file in chain(base, (*above, recipe.resolve()))]
    return [*bases, recipe]


def for_gpu(files: Sequence[Path]) -> list[Path]:
    """Return the files that apply after ``files`` on a GPU; raises ``ConfigError`` if one of them is missing."""
    return [override for file in files for override in _named(file, "gpu")]


def _named(path: Path, key: str) -> list[Path]:
    value = read(path).get(key) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key}: {value!r} in {path} is not a file or a list of files")
    return [_locate(name, path, key) for name in names]


def _locate(name: str, child: Path, key: str) -> Path:
    for folder in (child.parent, shipped_root()):
        if is_file(folder / name):
            return folder / name
    raise ConfigError(f"{key}: {name!r} in {child} does not exist, neither beside it nor in {shipped_root()}")


def read(path: Path) -> dict[str, Any]:
    """Return the settings in ``path`` as they are written there; ``ConfigError`` if it is no mapping of settings."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of a file that is no text
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"recipe {path} is {'empty' if content is None else 'not a mapping of settings'}")
    for key, group in content.items():
        for name in (key, *(group if isinstance(group, dict) else ())):
            if not isinstance(name, str) or not name:
                raise ConfigError(f"recipe {path}: {name!r} is not the name of a setting")
        if key in GROUPS and not isinstance(group, dict):
            what = "has no settings; remove it" if group is None else f"{group!r} is no group of settings"
            raise ConfigError(f"recipe {path}: {key}: {what}")
    return content


def gigabytes(recipe: Path) -> int:
    """Return the GB of GPU memory of a recipe; 0 if it has none, or less than one."""
    memory = dict(dotted(read(recipe))).get("trainer.strategy.memory")
    return 0 if memory is None else parse_bytes(memory) // 10**9


def ram_gigabytes(recipe: Path) -> int:
    """Return the GB of RAM of the plan in a recipe's header; 0 if it has none."""
    match = re.search(r"\((\d+) GB of RAM\)", describe(recipe))
    return int(match[1]) if match else 0


def largest_within(device_bytes: int, ram_bytes: int) -> str | None:
    """Return the shipped recipe that makes the most of a card and of RAM without taking more; None if there is none."""
    sizes = {name: (gigabytes(path), ram_gigabytes(path)) for name, path in shipped().items()}
    fitting = {n: (gpu, ram) for n, (gpu, ram) in sizes.items() if ram and gpu * 1e9 <= device_bytes}
    fitting = {n: size for n, size in fitting.items() if size[1] * 1e9 <= ram_bytes}
    return max(fitting, key=lambda name: fitting[name], default=None)


def describe(recipe: Path) -> str:
    """Return the first line of a recipe's header comment."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def run_name(recipe: Path) -> str:
    """Return the name of runs of ``recipe``: its own, or its folder's if it is the ``config.yaml`` of a run."""
    folder = recipe.resolve().parent.name
    if recipe.name != "config.yaml" or not folder:
        return recipe.stem
    stamped = re.fullmatch(r"(.+)-\d{8}-\d{6}", folder)
    return stamped[1] if stamped else folder


_CALLBACKS = "--trainer.callbacks"
_PIECES = {"lora": "lora.yaml", "adapter": "adapter.yaml"}
"""Shipped files with settings that suit a setting of the model, by that setting."""


def compose(files: Sequence[Path], args: Sequence[str]) -> list[str]:
    """Return the arguments for the parser: ``files``, later ones first in rank, then the flags ``args``, with ``=``."""
    for setting, piece in _PIECES.items():
        files = _with_piece(files, args, setting, piece)
    merged = _callbacks(files)
    return [
        *(part for file in files for part in ("--config", str(file), *_architecture(file))),
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
    for index, file in enumerate(files):
        if _group(file, "model").get(setting) is not None:
            # The piece comes before that file, whose learning rate has to win, as those of all later files do.
            return [*files] if file.resolve() == piece.resolve() else [*files[:index], piece, *files[index:]]
    # Where a flag switches it on, it comes behind all files: flags override it anyway.
    return [*files, piece] if any(_switches_on(arg, setting) for arg in args) else [*files]


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
        # null and [] empty the list, as flags of theirs do: a recipe can get rid of its bases' callbacks.
        if not callbacks:
            merged = []
            continue
        merged += [one for one in (callbacks if isinstance(callbacks, list) else [callbacks]) if one not in merged]
    # One file's list is what the parser makes of it, and its errors name that file.
    return merged if mentions > 1 else None


def _group(file: Path, name: str) -> dict[str, Any]:
    group = read(file).get(name)
    return group if isinstance(group, dict) else {}
