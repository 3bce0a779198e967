"""Standard error as people see it: lines that stay, and one about the present activity, drawn anew on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


class Terminal:
    """The line that is drawn anew: by :func:`status` before and after training, by ``ProgressLine`` meanwhile.

    Nothing is drawn where the output is no terminal, ``NO_COLOR`` or ``CI`` is set, or somebody else draws.
    """

    def __init__(self) -> None:
        self.stream: Console | None = None
        """The console; None: standard error."""
        self.phase = ""
        """The first word of the last line about an activity in a log."""
        self._live: Any = None
        self._below = False

    @property
    def console(self) -> Console:
        """The console that is drawn on."""
        from rich.console import Console

        console: Console = self._live.console if self._live is not None else self.stream or Console(stderr=True)
        return console

    @property
    def draws(self) -> bool:
        """True if a line can be drawn anew."""
        if self._live is not None or (self.stream is None and not sys.stderr.isatty()):
            return self._live is not None
        console, ours = self.console, self.stream is not None or sys.stderr is sys.__stderr__
        return ours and console.is_terminal and not (console.is_dumb_terminal or os.environ.keys() & {"NO_COLOR", "CI"})

    def draw(self, line: RenderableType, *, below: bool = False) -> None:
        """Draw ``line`` in the place of the one before, and ``below`` what others print meanwhile."""
        from rich.live import Live

        if self._live is None or (below and not self._below):
            self.clear()
            # What is printed goes above the line only where it goes to the terminal: into a file it goes as it is. The
            # bars of libraries are lines that are drawn anew, too, and would wait for their end there.
            redirect = below and sys.stdout.isatty()
            live = Live(console=self.console, auto_refresh=False, redirect_stdout=redirect, redirect_stderr=below)
            live.start()
            self._live, self._below = live, below
        self._live.update(line, refresh=True)

    def clear(self, *, keep: bool = False) -> None:
        """Take the line from the terminal, for what is printed next, or ``keep`` it there."""
        live, self._live = self._live, None
        if live is not None:
            live.transient = not keep
            live.stop()


TERMINAL = Terminal()
"""The terminal of this process."""


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
        TERMINAL.phase = ""
        _quiet.reset(token)


def say(message: str) -> None:
    """Print a message that stays."""
    if not quiet():
        clear()
        print(wrapped(message), file=sys.stderr, flush=True)


def status(message: str) -> None:
    """Show a message about the present activity.

    On a terminal the next message takes the place of this one. Elsewhere it is a line, unless the one before it began
    with the same word: one line for all measurements, one for all planning.
    """
    if quiet():
        return
    if TERMINAL.draws:
        from rich.text import Text

        TERMINAL.draw(Text(f"{message} ...", no_wrap=True, overflow="crop"))
        return
    if sys.stderr is not sys.__stderr__ and sys.stderr.isatty():
        return  # somebody draws a line of theirs
    # A log gets the first line of each phase; hundreds of "measuring block n" would bury what matters.
    phase = message.split()[0]
    if phase != TERMINAL.phase:
        TERMINAL.phase = phase
        print(f"{message} ...", file=sys.stderr, flush=True)


def clear() -> None:
    """Take the line of :func:`status` from the terminal, for what is printed next."""
    TERMINAL.clear()


def wrapped(message: str) -> str:
    """Return ``message`` in lines that a terminal breaks between words, paths and names whole; as it is for a file."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    # Long words and hyphens stay whole: a path that is broken cannot be copied.
    wrap = textwrap.TextWrapper(width, replace_whitespace=False, break_long_words=False, break_on_hyphens=False)
    return "\n".join(more for line in message.split("\n") for more in wrap.wrap(line) or [""])
