"""Lists settings as pages show them: what a key is called, takes, is without being set, and means.

They are read from the source, in the same way as the help of ``lt-finetune``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lt_offload.cli.static.documented import Documented, Parameter
from lt_offload.cli.static.help import as_yaml
from lt_offload.cli.static.source import read_definition
from lt_offload.cli.table import VERBS

_TYPES = {
    "None": "null",
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "Any": "any value",
}
_ALTERNATIVE = re.compile(r"(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|[^|\[])+")
"""What stands between two ``|`` of a type; brackets are left whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting."""

    name: str
    """As a recipe or a command spells it: ``model.lora.r``, ``--memory``."""
    type: str
    default: str | None
    """As YAML writes it; None: it has to be given; empty: there may be any number of them."""
    meaning: str


def keys(target: str, prefix: str, *, skip: tuple[str, ...] = ()) -> list[Key]:
    """Return the parameters of a class or function, those of groups of settings after them.

    Args:
        target: where it is: ``package.module.Name``.
        prefix: put before each name.
        skip: parameters that are no settings.

    Raises:
        ValueError: if a parameter is not in the docstring.
    """
    module, _, name = target.rpartition(".")
    return [key for key in _of(read_definition(module, name), prefix) if key.name not in skip]


def verbs() -> str:
    """Return what every verb is for, with its words and flags."""
    parts = []
    for verb in VERBS.values():
        found = verb.read()
        words = ["RECIPE"] * verb.recipe + [p.name.upper() for p in found.parameters if p.kind != "flag"]
        parts.append(f"### `{' '.join(['lt-finetune', verb.name, *words])}` {{#{verb.name}}}")
        parts += [_sentence(found.summary), *filter(None, [found.details])]
        parts.append(markdown(list(_of(found, "--")), within=f"{verb.name}-"))
    return "\n\n".join(filter(None, parts))


def markdown(found: list[Key], *, within: str = "") -> str:
    """Return a definition list; every key is an anchor, with ``within`` before its name."""
    return "\n\n".join(
        f"[`{key.name}`](#{within}{key.name}){{#{within}{key.name} .key}} <span class='type'>{key.type}"
        + (" · required" if key.default is None else f" · `{key.default}`" if key.default else "")
        + f"</span>\n:   {key.meaning}"
        for key in found
    )


def _of(target: Documented, prefix: str) -> Iterator[Key]:
    for parameter in target.parameters:
        if not parameter.about:
            raise ValueError(f"{target.name} has no word about {parameter.name}")
        dashes = "" if prefix == "--" and parameter.kind != "flag" else prefix
        yield Key(
            name=parameter.name.upper() if prefix == "--" and not dashes else prefix + parameter.name,
            type=_type(parameter),
            default=_default(parameter),
            meaning=_sentence(parameter.about),
        )
        if parameter.group is not None:
            yield from _of(parameter.group, f"{prefix}{parameter.name}.")


def _type(parameter: Parameter) -> str:
    """Return what people call a type."""
    words: list[str] = []
    for one in map(str.strip, _ALTERNATIVE.findall(parameter.annotation)):
        if one.startswith("Literal["):
            words += [f"`{value}`" for value in ast.literal_eval(one.removeprefix("Literal"))]
        elif parameter.group is not None and one not in _TYPES:
            words.append("group of settings")
        elif one.startswith(("list", "tuple", "Sequence")):
            words.append("list")
        elif one.startswith(("dict", "Mapping")):
            words.append("map")
        else:
            words.append(_TYPES.get(one, one))
    return " or ".join(dict.fromkeys(words))


def _default(parameter: Parameter) -> str | None:
    if parameter.default is None:
        return None if parameter.required else ""
    return as_yaml(parameter.default) or "''"


def _sentence(text: str) -> str:
    """Return a description as one paragraph that begins with a capital and ends with a full stop."""
    line = " ".join(text.split())
    line = line if line[:1] in "`'\"" else line[:1].upper() + line[1:]
    return line if line.endswith((".", ")")) else line + "."
