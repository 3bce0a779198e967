"""The verbs of ``lt-finetune``, one line each: help, completion, suggestions and dispatch all read this table.

A function with the verb's name carries it out: its docstring is the help, its parameters are words and flags.
With ``recipe`` the first word is a recipe, and the function gets its settings as an :class:`~lt_offload.cli.app.App`,
made by Lightning's command line. Without, it gets what ``static/arguments.py`` makes of its signature: positional
parameters are words, the others flags. Functions are imported when they are called, so that only those are slow
that need something slow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from lt_offload.cli.static.definitions import definition
from lt_offload.cli.static.documented import Documented


@dataclass(frozen=True, slots=True)
class Verb:
    """What one verb needs and where it is."""

    name: str
    summary: str
    """What it is for, in a few words."""
    recipe: bool = True
    """Whether its first word is a recipe, whose settings it needs, and with them Lightning."""
    module: str = ""
    """Below ``lt_offload.cli``; its own file in ``verbs`` if not given."""

    @property
    def source(self) -> str:
        """The module of its function."""
        return f"lt_offload.cli.{self.module or f'verbs.{self.name}'}"

    def read(self) -> Documented:
        """Return its words, flags and their meaning, without importing it."""
        return definition(self.source, self.name)

    def load(self) -> Callable[..., int]:
        """Import it, and return its function, which returns the exit code."""
        function: Callable[..., int] = getattr(imported(self.source), self.name)
        return function


def imported(module: str) -> ModuleType:
    """Import a module that takes seconds.

    Nothing that modules make is garbage, and looking for some again and again would take a fifth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()


VERBS = {
    verb.name: verb
    for verb in (
        Verb("fit", "fine-tune (this verb may be left out)"),
        Verb("plan", "how fast, with how much memory? no weights, no GPU needed"),
        Verb("data", "what is trained on: samples in colour, lengths, what is cut"),
        Verb("validate", "loss on held-out data"),
        Verb("generate", "the model continues a prompt"),
        Verb("chat", "talk to the model in the terminal"),
        Verb("export", "write a Hugging Face folder, adapters or a GGUF file"),
        Verb("check", "is every setting known and of the right type?"),
        Verb("new", "write a recipe for any causal model by planning it", recipe=False),
        Verb("ls", "list the recipes that come with it", recipe=False, module="verbs.files"),
        Verb("cp", "copy a recipe, to change it", recipe=False, module="verbs.files"),
        Verb("compare", "settings, losses and speed of runs, side by side", recipe=False),
        Verb("doctor", "measure what this machine can do", recipe=False),
        Verb("completion", "let bash, zsh or fish complete all this", recipe=False, module="static.completion"),
    )
}
