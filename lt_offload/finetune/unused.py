"""The refusal of settings that would change nothing; defaults that do not apply are accepted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lt_offload.errors import ConfigError


def default_of(owner: Callable[..., Any], name: str) -> Any:
    """Return the default of the parameter ``name`` of ``owner``."""
    return inspect.signature(owner).parameters[name].default


def refuse_unused(
    owner: Callable[..., Any], prefix: str, settings: Mapping[str, object], beside: str, *, instead: str
) -> None:
    """Raise ``ConfigError`` for the first setting that is not at its default.

    Args:
        owner: function, or class, with the settings as parameters.
        prefix: of their names, in recipes or on the command line: ``data.``, ``--``.
        settings: values by name.
        beside: the setting with which they change nothing, and perhaps the reason.
        instead: the alternative to the default.
    """
    for name, value in settings.items():
        default = default_of(owner, name)
        # Values are compared as they are written: YAML has lists where a signature has tuples.
        if as_written(value) != as_written(default):
            raise ConfigError(
                f"{prefix}{name}={as_written(value)} changes nothing with {beside}; "
                f"set it to {as_written(default)}, or {instead}"
            )


def as_written(value: Any) -> Any:
    """Return ``value`` as a recipe writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return list(value) if isinstance(value, tuple) else value
