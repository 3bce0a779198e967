"""The refusal of settings that would change nothing; defaults that do not apply are accepted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lt_offload.errors import ConfigError


def refuse_unused(
    owner: Callable[..., Any], prefix: str, settings: Mapping[str, object], beside: str, *, instead: str
) -> None:
    """Raise ``ConfigError`` for the first of ``settings`` that is not at the default of ``owner``'s parameter.

    Their names have a ``prefix``: ``data.``, ``--``. They change nothing ``beside`` another setting; ``instead`` is the
    alternative to the default.
    """
    for name, value in settings.items():
        default = inspect.signature(owner).parameters[name].default
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
