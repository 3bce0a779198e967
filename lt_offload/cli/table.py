"""The verbs of ``lt-finetune``: help, completion, suggestions and dispatch all read this table.

A function with the verb's name carries it out: its docstring is the help, its parameters are words and flags.
With ``recipe`` the first word is a recipe, and the function gets its settings as an :class:`~lt_offload.cli.app.App`,
made by Lightning's command line. Without, it gets words and flags: positional parameters are words, the others flags.
Functions are imported when they are called, so that a verb without torch never waits for its import.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

DEFAULT_RECIPE = "quickstart"
"""The recipe of verbs that need none to be named."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its needs, and the place of its function."""

    name: str
    recipe: bool = True
    """True if its first word is a recipe; the verb then needs the settings, and with them Lightning."""
    default: bool = False
    """True if :data:`DEFAULT_RECIPE` stands for a recipe that is not named."""
    module: str = ""
    """The module below ``lt_offload.cli``; empty: its own file in ``verbs``."""

    def load(self) -> Callable[..., int]:
        """Import it, and return its function, which returns the exit code."""
        function: Callable[..., int] = getattr(
            imported(f"lt_offload.cli.{self.module or f'verbs.{self.name}'}"), self.name
        )
        return function


def imported(module: str) -> ModuleType:
    """Import a module that takes seconds.

    Nothing that modules make is garbage: looking for some again and again would take a fifth of the time, and later
    searches leave it out.
    """
    collects, is_first = gc.isenabled(), module not in sys.modules
    gc.disable()
    try:
        return import_module(module)
    finally:
        if is_first:
            gc.freeze()
        if collects:
            gc.enable()


VERBS = {
    verb.name: verb
    for verb in (
        *map(Verb, ("fit", "plan", "data")),
        Verb("validate", module="verbs.fit"),
        Verb("generate", module="verbs.chat"),
        *map(Verb, ("chat", "export", "check")),
        Verb("verify", default=True),
        Verb("new", recipe=False),
        Verb("ls", recipe=False, module="verbs.files"),
        Verb("cp", recipe=False, module="verbs.files"),
        Verb("compare", recipe=False),
        Verb("doctor", recipe=False),
        Verb("completion", recipe=False, module="static.completion"),
    )
}
