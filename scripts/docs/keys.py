"""Lists settings as pages show them: what a key is called, takes, is without being set, and means.

They are the entries of the help of ``lt-finetune``.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from lt_offload.cli.static import pages
from lt_offload.cli.static.pages import HelpEntry
from lt_offload.cli.table import VERBS
from scripts.docs.help import entries

_TYPES = {
    "N": "number",
    "X": "number",
    "LIST": "list",
    "MAP": "map",
    "GROUP": "group of settings",
    "OBJECT": "object",
}
"""What people call the words in capitals; others stand for text."""


def keys(target: str, prefix: str, *, skip: tuple[str, ...] = ()) -> list[HelpEntry]:
    """Return the parameters of a class or function, those of groups of settings after them.

    Args:
        target: where it is: ``package.module.Name``.
        prefix: put before each name.
        skip: parameters that are no settings.

    Raises:
        ValueError: if a parameter is not in the docstring.
    """
    module, _, name = target.rpartition(".")
    return [entry for entry in entries(getattr(import_module(module), name), prefix) if entry.key not in skip]


def verbs() -> str:
    """Return what every verb is for, with its words and flags."""
    parts = []
    for verb in VERBS.values():
        found = pages.entries(verb.name).values()
        words = ["RECIPE"] * verb.recipe + [entry.name for entry in found if not entry.is_flag]
        parts.append(f"### `{' '.join(['lt-finetune', verb.name, *words])}` {{#{verb.name}}}")
        paragraphs = pages.page(verb.name).split("\n\n")[1:]
        parts += [text for text in paragraphs if not text.startswith(("  ", "flags:", "RECIPE is"))]
        parts.append(markdown(found, within=f"{verb.name}-"))
    return "\n\n".join(filter(None, parts))


def markdown(found: Iterable[HelpEntry], *, within: str = "") -> str:
    """Return a definition list; every key is an anchor, with ``within`` before its name."""
    lines = []
    for entry in found:
        key = entry.name if within else entry.key
        default = {None: "", "(to be set)": " · required"}.get(entry.value, f" · `{entry.value or repr('')}`")
        anchor = f"[`{key}`](#{within}{key}){{#{within}{key} .key}}"
        lines.append(f"{anchor} <span class='type'>{_type(entry)}{default}</span>\n:   {_sentence(entry.about)}")
    return "\n\n".join(lines)


def _type(entry: HelpEntry) -> str:
    """Return what people call a type."""
    if not entry.takes or entry.takes == "...":
        return "switch" if entry.is_switch else "text"
    words = "true or false" if {"true", "false"} <= set(entry.choices) else ""
    rest = [one for one in entry.takes.split("|") if not words or one not in ("true", "false")]
    named = [one if one == "null" else f"`{one}`" if one in entry.choices else _TYPES.get(one, "text") for one in rest]
    return " or ".join(filter(None, [words, *dict.fromkeys(named)]))


def _sentence(text: str) -> str:
    """Return a description as one paragraph that begins with a capital and ends with a full stop."""
    line = text if text[:1] in "`'\"" else text[:1].upper() + text[1:]
    return line if line.endswith((".", ")")) else line + "."
