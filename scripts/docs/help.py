"""Writes the pages of ``lt-finetune --help``, from signatures and docstrings to text that is read without them.

python -m scripts.docs.help            write lt_offload/cli/static/pages
python -m scripts.docs.help --check    exit with 1 if a page is not what the docstrings say
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import Docstring, parse
from lightning.pytorch import Trainer

from lt_offload.cli.static.pages import FOLDER, SETTINGS, HelpEntry
from lt_offload.cli.static.settings import LINKED, lightning_version
from lt_offload.cli.table import VERBS, Verb
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.nested import shown
from lt_offload.strategy.offmate import OffmateStrategy

GROUPS = {"model": FineTune, "data": FineTuneData, "trainer.strategy": OffmateStrategy, "trainer": Trainer}
"""The classes that the settings below each key belong to."""
_OF_A_RECIPE = (
    "RECIPE is a YAML file, the name of a shipped one, or a run folder. Every setting of it is a flag, too: "
    "'lt-finetune RECIPE --help' lists them."
)


def entries(target: Callable[..., Any], prefix: str = "") -> Iterator[HelpEntry]:
    """Yield the parameters of a function or of a class's constructor, those of groups of settings after their group.

    Raises:
        ValueError: if one of ours is not in the docstring.
    """
    about = {
        param.arg_name: " ".join((param.description or "").split()) for doc in _docs(target) for param in doc.params
    }
    # App is no flag, and some verbs import it for type checkers alone.
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, localns={"App": object})
    for name, parameter in inspect.signature(target).parameters.items():
        if name == "app":
            continue
        if not about.get(name) and target is not Trainer:
            raise ValueError(f"{target.__name__} has no word about {name}")
        types = [hints[name], *get_args(hints[name])]
        group = next((one for one in types if inspect.isclass(one) and is_dataclass(one)), None)
        yield _entry(prefix + name, parameter, hints[name], about.get(name, ""), of_verb=not prefix)
        if group is not None:
            yield from entries(group, f"{prefix}{name}.")


def _entry(name: str, parameter: inspect.Parameter, hint: Any, about: str, *, of_verb: bool) -> HelpEntry:
    default = parameter.default
    takes = list(dict.fromkeys(_takes(hint, name.upper() if of_verb else "TEXT")))
    if of_verb and parameter.kind is not parameter.KEYWORD_ONLY:
        many = parameter.kind is parameter.VAR_POSITIONAL
        return HelpEntry(
            name.upper(), "..." if many else "" if takes == [name.upper()] else "|".join(takes), None, about
        )
    if of_verb and default is False:
        return HelpEntry(f"--{name}", "", None, about)
    if of_verb and default is None:
        return HelpEntry(f"--{name}", "|".join(one for one in takes if one != "null"), None, about)
    value = "(to be set)" if default is parameter.empty else shown(list(default) if type(default) is tuple else default)
    return HelpEntry(f"--{name}", "|".join(takes), value, about)


def _takes(hint: Any, name: str) -> Iterator[str]:
    """Yield the values that a type has, or a word in capitals for those that nobody could list."""
    plain = {NoneType: "null", int: "N", float: "X", str: name, Path: name}
    origin = get_origin(hint)
    if hint is bool:
        yield from ("true", "false")
    elif origin is Literal:
        yield from map(str, get_args(hint))
    elif hint in plain:
        yield plain[hint]
    elif inspect.isclass(hint) or origin in (list, tuple, dict):
        yield {list: "LIST", tuple: "LIST", dict: "MAP"}.get(origin, "GROUP" if is_dataclass(hint) else "OBJECT")
    else:
        for one in get_args(hint):
            yield from _takes(one, name)


def _docs(target: Callable[..., Any]) -> list[Docstring]:
    texts = [target.__doc__, target.__init__.__doc__ if inspect.isclass(target) else None]
    return [parse(inspect.cleandoc(text)) for text in texts if text]


def description(target: Callable[..., Any]) -> list[str]:
    """Return the paragraphs of the docstring before the arguments."""
    doc = _docs(target)[0]
    return [_plain(text) for text in (doc.short_description or "", *(doc.long_description or "").split("\n\n")) if text]


def _plain(text: str) -> str:
    """Return ``text`` in one line, without the marks of docstrings, and with the word for nothing that recipes have."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([\w]+)[^`]*`", r"\1", " ".join(text.split()))
    text = re.sub(r"`+([^`]*)`+_?", r"\1", text)
    return re.sub(r"\bNone\b", "null", text)


def of_verb(verb: Verb) -> str:
    """Return the page of one verb."""
    function = verb.load()
    parts = [replace(entry, about=_plain(entry.about)) for entry in entries(function)]
    words, flags = ([one for one in parts if one.is_flag is kind] for kind in (False, True))
    if verb.recipe:
        recipe = "[RECIPE]" if verb.default else "RECIPE"
        call = f"{'' if verb.name == 'fit' else verb.name + ' '}{recipe} [--key value ...]"
    else:
        called = [f"{word.name} ..." if word.takes == "..." else word.name for word in words]
        call = " ".join([verb.name, *called, *(f"[{f'{flag.name} {flag.takes}'.strip()}]" for flag in flags)])
    lines = [f"usage: lt-finetune {call}"]
    lines += [line for paragraph in description(function) for line in ("", paragraph)]
    lines += ["", *(word.text for word in words)] if words else []
    lines += ["", "flags:", *(flag.text for flag in flags)] if flags else []
    return "\n".join([*lines, *(["", _OF_A_RECIPE] if verb.recipe else [])]) + "\n"


def of_settings() -> str:
    """Return the page of all settings, group by group."""
    parts = []
    for name, target in GROUPS.items():
        first, *more = description(target)
        lines = [f"{name}: {first}", *([f"Of Lightning {lightning_version()}."] if target is Trainer else more)]
        below = [entry for entry in entries(target, f"{name}.") if entry.key not in LINKED]
        parts.append(
            "\n\n".join(lines)
            + "\n\n"
            + "\n".join(replace(entry, about=_plain(entry.about)).text for entry in below)
            + "\n"
        )
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """Return all pages by their names."""
    return {name: of_verb(verb) for name, verb in VERBS.items()} | {SETTINGS: of_settings()}


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    check = parser.parse_args().check
    for name, text in pages().items():
        file = FOLDER / f"{name}.txt"
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is out of date; run python -m scripts.docs.help", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
