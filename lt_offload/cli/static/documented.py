"""Docstring and parameters of a function or a class that settings or flags belong to."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function or of a class's constructor."""

    name: str
    kind: str
    """``word``: positional, ``words``: any number of them, ``flag``: by name only."""
    annotation: str
    """Its type as written, names of literal types replaced by their values."""
    default: str | None
    """As written; None: it has to be given."""
    about: str
    """Its meaning, from the docstring; empty if that has none."""
    group: Documented | None = None
    """The class of settings that its type stands for."""

    @property
    def required(self) -> bool:
        """Whether it has to be given."""
        return self.default is None and self.kind != "words"

    @property
    def is_switch(self) -> bool:
        """Whether it is a flag that is off, and needs no value to be switched on."""
        return self.annotation == "bool" and self.default == "False"

    @property
    def choices(self) -> list[str]:
        """The values of a literal type, none if it is another type."""
        found = re.search(r"Literal\[([^\]]*)\]", self.annotation)
        return [str(value) for value in ast.literal_eval(f"[{found[1]}]")] if found else []

    @property
    def only_choices(self) -> bool:
        """Whether it takes no other value than these, and None."""
        return bool(re.fullmatch(r"Literal\[[^\]]*\](?: \| None)?", self.annotation))


@dataclass(frozen=True, slots=True)
class Documented:
    """A function or a class: its docstring and its parameters."""

    name: str
    summary: str
    """First paragraph of the docstring."""
    details: str
    """The text after that, up to the arguments."""
    parameters: tuple[Parameter, ...]
