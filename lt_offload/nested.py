"""Settings in groups, as files have them, and other nested values, by the dotted names that flags have."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its dotted name: a class by the name of its group, what it is made with below that."""
    for name, value in settings.items():
        if name == "init_args" or (isinstance(value, dict) and value):
            yield from dotted(value or {}, prefix if name == "init_args" else f"{prefix}{name}.")
        else:
            yield (prefix.removesuffix(".") if name == "class_path" else f"{prefix}{name}"), value


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what mappings, lists and tuples hold, by their keys and places, joined by dots, below ``name``."""
    if not isinstance(value, Mapping | list | tuple):
        yield name, value
        return
    for key, member in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(member, f"{name}.{key}" if name else str(key))


def shown(value: Any, most: int = 60) -> str:
    """Return a value as a recipe has it, in one line of at most so many characters; classes by their names."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        names = (one.get("class_path", "...") if isinstance(one, dict) else shown(one) for one in value)
        return ", ".join(name.rpartition(".")[2] for name in names)
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return textwrap.shorten(
        value if isinstance(value, str) else json.dumps(value, default=str), most, placeholder=" ..."
    )
