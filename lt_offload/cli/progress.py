"""Progress of the command line: lines on standard error, none with ``--quiet``."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
_ERASE = "\r\033[2K"
_state = {"drawn": False, "phase": ""}
"""State of :func:`status`: a line of it is on the terminal, and the first word of the last line in a log."""


def quiet() -> bool:
    """Return whether only results, warnings and errors are wanted."""
    return _quiet.get()


@contextmanager
def keeping_quiet(on: bool) -> Iterator[None]:
    """Print nothing within the context if ``on``."""
    token = _quiet.set(on)
    try:
        yield
    finally:
        clear()
        _state["phase"] = ""
        _quiet.reset(token)


def say(message: str) -> None:
    """Print a message that stays."""
    if not quiet():
        clear()
        print(wrapped(message), file=sys.stderr, flush=True)


def status(message: str) -> None:
    """Show a message about the present activity.

    On a terminal the next message takes the place of this one; nothing is said while a line of progress is drawn there.
    Elsewhere it is a line, unless the one before it began with the same word: one line for all measurements, one
    for all planning.
    """
    if quiet():
        return
    if draws():
        width = shutil.get_terminal_size().columns
        sys.stderr.write(f"{_ERASE}{f'{message} ...'[: width - 1]}")
        sys.stderr.flush()
        _state["drawn"] = True
        return
    if _others_draw():
        return
    # A log gets the first line of each phase; hundreds of "measuring block n" would bury what matters.
    phase = message.split()[0]
    if phase != _state["phase"]:
        _state["phase"] = phase
        print(f"{message} ...", file=sys.stderr, flush=True)


def clear() -> None:
    """Take the line of :func:`status` from the terminal, for what is printed next."""
    if _state["drawn"]:
        _state["drawn"] = False
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


def wrapped(message: str) -> str:
    """Return ``message`` in lines that a terminal breaks between words, paths and names whole; as it is for a file."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    # Long words and hyphens stay whole: a path that is broken cannot be copied.
    wrap = textwrap.TextWrapper(width, replace_whitespace=False, break_long_words=False, break_on_hyphens=False)
    return "\n".join(more for line in message.split("\n") for more in wrap.wrap(line) or [""])


def draws() -> bool:
    """Return whether a line can be drawn anew: on a terminal that nobody else draws on."""
    stream = sys.__stderr__
    return stream is not None and sys.stderr is stream and _can_be_drawn_on(stream)


def _others_draw() -> bool:
    """Return whether somebody has put something between us and a terminal, to draw a line of theirs."""
    stream = sys.__stderr__
    return stream is not None and sys.stderr is not stream and sys.stderr.isatty() and _can_be_drawn_on(stream)


def _can_be_drawn_on(stream: TextIO) -> bool:
    plain = os.environ.get("TERM") == "dumb" or os.environ.keys() & {"NO_COLOR", "CI"}
    return stream.isatty() and not plain
