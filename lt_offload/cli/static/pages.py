"""The pages of ``--help``: the program, a verb, a recipe with the values of its settings, a group of settings.

They are text files, which ``python -m scripts.docs.help`` renders from signatures and docstrings: nothing that is slow
is imported to show them, to complete a flag, or to find a slip in one.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lt_offload.cli import recipes
from lt_offload.errors import ConfigError
from lt_offload.nested import shown
from lt_offload.suggest import did_you_mean

FOLDER = Path(__file__).with_name("pages")
PROGRAM, SETTINGS = "lt-finetune", "settings"
"""Names of the pages that are not of a verb."""
_FIRST_SENTENCE = re.compile(r"(?<=\.)\s(?=[A-Z])")
_NARROWEST, _WIDEST = 40, 100
_ENTRY = re.compile(r"^  ((?:--)?[\w.]+)(?: (?!= )(\S+))?(?: = (.*))?\n      (.*)$", re.MULTILINE)
_COLUMNS = re.compile(r" *(?:\S+(?: \S+)* {2,})?")
"""The beginning of a line, up to where its text would go on in the next line."""


@dataclass(frozen=True, slots=True)
class HelpEntry:
    """A setting, a flag or a word of a verb, as a page has it."""

    name: str
    """``--model.lr``, ``--save``; words in capitals."""
    takes: str
    """Its values, with ``|`` between them, in capitals where they are not listed; a switch has none."""
    value: str | None
    """The default, or what a recipe says instead; None: none that is shown."""
    about: str

    @property
    def key(self) -> str:
        """The name without dashes."""
        return self.name.removeprefix("--")

    @property
    def is_flag(self) -> bool:
        """True for a flag, False for a word."""
        return self.name.startswith("--")

    @property
    def is_switch(self) -> bool:
        """True for a flag that needs no value."""
        return self.is_flag and not self.takes

    @property
    def choices(self) -> list[str]:
        """The values that are listed."""
        return [one for one in self.takes.split("|") if re.search(r"[a-z0-9]", one)]

    @property
    def only_choices(self) -> bool:
        """True if there are no other values than the listed ones."""
        return bool(self.choices) and len(self.choices) == len(self.takes.split("|"))

    @property
    def text(self) -> str:
        """The two lines of a page."""
        value = "" if self.value is None else f" = {self.value}"
        return f"  {self.name}{' ' * bool(self.takes)}{self.takes}{value}\n      {self.about}"


@cache
def page(name: str) -> str:
    """Return a page as it is stored, each paragraph in one line."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@cache
def entries(name: str) -> dict[str, HelpEntry]:
    """Return the entries of a page by their keys."""
    listed = (HelpEntry(match[1], match[2] or "", match[3], match[4]) for match in _ENTRY.finditer(page(name)))
    return {entry.key: entry for entry in listed}


@cache
def groups() -> dict[str, str]:
    """Return the text of each group of settings before its entries."""
    parts = re.split(r"^(?=[\w.]+: )", page(SETTINGS), flags=re.MULTILINE)
    return {name: text.partition("\n  --")[0] for name, _, text in (part.partition(": ") for part in parts if part)}


def of_group(key: str) -> list[HelpEntry]:
    """Return a setting and all below it; those of the strategy are no part of the Trainer's."""
    group = [entry for name, entry in entries(SETTINGS).items() if name == key or name.startswith(f"{key}.")]
    if key in groups():
        group = [entry for entry in group if entry.key != key]
    return [entry for entry in group if key != "trainer" or not entry.key.startswith("trainer.strategy.")]


# -- what is shown ---------------------------------------------------------------------------------------------------


def recipe_help(verb: str, files: Sequence[Path], values: dict[str, Any]) -> str:
    """Return the help of ``verb`` with a recipe of ``files``: its flags, and every setting with its value."""
    first, *_ = page(verb).split("\n\n")[1:]
    call = f"{'' if verb == 'fit' else f'{verb} '}{files[-1].stem}"
    lines = [f"usage: lt-finetune {call} [--key value ...]", "", recipes.describe(files[-1]), ""]
    lines += [f"{first} Its flags, and those of every verb:", *(entry.text for entry in entries(verb).values())]
    lines += [page("every-verb"), "Settings, each with its value after =; --data.help, --model.lr.help ... say more."]
    for name, about in groups().items():
        own = of_group(name)
        # A Trainer has dozens of settings, most of which no recipe
        # needs: those that are set, the names of the others.
        chosen = [entry for entry in own if name != "trainer" or entry.key in values]
        lines += ["", f"{name}: {about.splitlines()[0]}"]
        lines += [
            replace(_with_value(one, values), about=_FIRST_SENTENCE.split(one.about, 1)[0]).text for one in chosen
        ]
        if left := [entry.key.rpartition(".")[2] for entry in own if entry not in chosen]:
            lines += ["", f"  Others, explained by --{name}.help: {', '.join(left)}"]
    return "\n".join(lines)


def group_help(key: str, values: dict[str, Any]) -> str:
    """Return the help of the settings at and below ``key``, in full; raises ``ConfigError`` if there are none."""
    chosen = of_group(key)
    if not chosen:
        raise ConfigError(f"there is no setting {key!r} to explain{did_you_mean(key, [*groups(), *entries(SETTINGS)])}")
    return "\n".join([*([groups()[key]] if key in groups() else []), *(_explained(one, values) for one in chosen)])


def _explained(entry: HelpEntry, values: dict[str, Any]) -> str:
    # Lightning's docstrings tell some defaults themselves, and in other words.
    tells = entry.value == "(to be set)" or re.search(r"[Dd]efaults?\b", entry.about)
    about = entry.about if tells else f"{entry.about} Default: {entry.value}."
    return replace(_with_value(entry, values), about=about).text


def _with_value(entry: HelpEntry, values: dict[str, Any]) -> HelpEntry:
    """Return ``entry`` with the value that a recipe has instead of the default."""
    if entry.key in values:
        return replace(entry, value=shown(values[entry.key]))
    below = entry.value == "null" and any(key.startswith(f"{entry.key}.") for key in values)
    return replace(entry, value="see below") if below else entry


def show(text: str) -> int:
    """Print a page in lines that are as long as the terminal is wide; return the exit code."""
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
    print(*(line for part in text.splitlines() for line in _wrapped(part, width)), sep="\n")
    return 0


def _wrapped(line: str, width: int) -> Iterable[str]:
    if line.startswith("  --") and "   " not in line:  # a flag with its value, which may be copied
        return [line]
    begins = _COLUMNS.match(line)
    indent = " " * (begins.end() if begins else 0)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
