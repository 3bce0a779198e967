"""What the command line says while it works: lines on standard error, none with ``--quiet``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def quiet() -> bool:
    """Return whether only results, warnings and errors are wanted."""
    return _quiet.get()


@contextmanager
def keeping_quiet(on: bool) -> Iterator[None]:
    """Say nothing inside if ``on``."""
    token = _quiet.set(on)
    try:
        yield
    finally:
        _quiet.reset(token)


def say(message: str) -> None:
    """Tell what comes next."""
    if not quiet():
        print(message, file=sys.stderr, flush=True)
