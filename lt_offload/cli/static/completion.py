"""``lt-finetune completion``: a script for a shell to complete verbs, recipes, flags and their values.

The script is argcomplete's. It asks ``lt-finetune`` itself, which answers from static tables in about a tenth of a
second; so it knows the user's own recipes and the values that settings can have, and never grows old.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Literal

from lt_offload.cli import recipes
from lt_offload.cli.static.pages import SETTINGS, entries, groups
from lt_offload.cli.static.settings import of_call, standing_alone
from lt_offload.cli.table import VERBS, Verb
from lt_offload.resources import shipped_files

Shell = Literal["bash", "zsh", "fish"]
ASKED = "_ARGCOMPLETE"
"""The variable of the environment that a shell sets to ask."""
FILES = ":files"
"""An answer: complete names of files, too."""
OPTIONS = ("--help", "--version", "--quiet", "--debug")
"""Flags of the program, without a verb."""


def completion(shell: Shell) -> int:
    """Print what makes a shell complete verbs, recipes, settings and files.

    bash: eval "$(lt-finetune completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc. fish: lt-finetune
    completion fish > ~/.config/fish/completions/lt-finetune.fish.

    Args:
        shell: bash, zsh or fish.
    """
    from argcomplete.shell_integration import shellcode

    print(shellcode(["lt-finetune"], shell=shell))
    return 0


def answer() -> None:
    """Tell a shell that asks the completions of its line, and end the process."""
    import argcomplete
    from argcomplete.completers import FilesCompleter

    def completed(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        words = answers([*(parsed_args.words or ()), prefix])
        if FILES not in words:
            return words
        flag, equals, value = prefix.rpartition("=")
        files = FilesCompleter()(value)
        return [*(word for word in words if word != FILES), *(f"{flag}{equals}{file}" for file in files)]

    # No word is a flag to this parser: what a word can be is known here.
    parser = argparse.ArgumentParser(prefix_chars="\0", add_help=False)
    parser.add_argument("words", nargs="*").completer = completed  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def answers(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of ``words``, which is empty if nothing is typed yet; ``FILES`` for files."""
    *before, last = words or [""]
    candidates = [*_candidates(before, last)]
    return [word for word in candidates if word == FILES or word.startswith(last)]


def _candidates(before: Sequence[str], last: str) -> Sequence[str]:
    if list(before) == ["help"]:
        return list(VERBS)
    if not before:
        return OPTIONS if last.startswith("-") else [*VERBS, *recipes.shipped(), FILES]
    verb = VERBS.get(before[0])
    words = list(before if verb is None else before[1:])
    if verb is None:
        verb = VERBS["fit"]
    name, equals, _ = last.partition("=")
    if equals:
        return [f"{name}={value}" for value in _values(verb, name)] + ([FILES] if not _values(verb, name) else [])
    if last.startswith("-"):
        return _flags(verb)
    if words and words[-1].startswith("--") and words[-1][2:] not in standing_alone():
        return _values(verb, words[-1]) or [FILES]
    places = [entry for entry in entries(verb.name).values() if not entry.is_flag]
    if (verb.recipe and words) or not (verb.recipe or places):
        return _flags(verb)
    place = places[min(len(words), len(places) - 1)] if places else None
    if place is None or place.name == "RECIPE":
        return [*recipes.shipped(), FILES]
    return place.choices or [FILES]


def _flags(verb: Verb) -> list[str]:
    if verb.recipe:
        names = [*of_call(verb), *entries(SETTINGS), *(f"{name}.help" for name in groups())]
    else:
        names = [*(entry.key for entry in entries(verb.name).values() if entry.is_flag), "help"]
    return [f"--{name}" for name in names]


def _values(verb: Verb, flag: str) -> list[str]:
    """Return the values that ``flag`` can have, nothing if they cannot be listed."""
    name = flag.removeprefix("--")
    if name == "hardware":
        return list(shipped_files("configs/hardware", ".yaml"))
    known = entries(SETTINGS) | entries(verb.name) if verb.recipe else entries(verb.name)
    return known[name].choices if name in known else []
