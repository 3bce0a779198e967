"""Settings in groups, as files have them, by the dotted names that flags have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its dotted name: a class by the name of its group, what it is made with below that."""
    for name, value in settings.items():
        if name == "init_args" or (isinstance(value, dict) and value):
            yield from dotted(value or {}, prefix if name == "init_args" else f"{prefix}{name}.")
        else:
            yield (prefix.removesuffix(".") if name == "class_path" else f"{prefix}{name}"), value
