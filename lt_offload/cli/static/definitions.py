"""A file of the parameters of constructors and verbs, made of their docstrings.

A constructor's parameters are settings and a verb's are flags. ``python -m scripts.docs.definitions`` makes the file
anew. If another version of Lightning is installed than the file was made with, its source is read.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lt_offload.cli.static.documented import Documented, Parameter

FILE = Path(__file__).with_suffix(".json")
LIGHTNING = "lightning"


def definition(module: str, name: str, file: Path = FILE) -> Documented:
    """Return what ``file`` says about the function or class ``name`` of ``module``.

    Raises:
        LookupError: if it is not in the file.
    """
    stored = _stored(file)
    # Only Lightning's part can be out of date: ours is written with each change, which a test holds.
    if module.partition(".")[0] == LIGHTNING and stored[LIGHTNING] != lightning_version():
        from lt_offload.cli.static.source import read_definition

        return read_definition(module, name)
    return _documented(stored[_key(module, name)])


def as_file(found: dict[tuple[str, str], Documented]) -> str:
    """Return the text of a file that has ``found``, by module and name."""
    values = {_key(*where): asdict(documented) for where, documented in found.items()}
    return json.dumps({LIGHTNING: lightning_version(), **values}, indent=1) + "\n"


def lightning_version() -> str | None:
    """Return the version of Lightning that is installed, None if none is."""
    try:
        return version(LIGHTNING)
    except PackageNotFoundError:
        return None


@cache
def _stored(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _key(module: str, name: str) -> str:
    return f"{module}:{name}"


def _documented(value: dict[str, Any]) -> Documented:
    return Documented(**value | {"parameters": tuple(map(_parameter, value["parameters"]))})


def _parameter(value: dict[str, Any]) -> Parameter:
    group = value["group"]
    return Parameter(**value | {"group": None if group is None else _documented(group)})
