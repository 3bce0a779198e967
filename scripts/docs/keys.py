"""Lists settings from signatures and docstrings: what a key is called, takes, is without being set, and means."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin

from docstring_parser import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting."""

    name: str
    """As a flag spells it, without dashes: ``model.lora.r``."""
    type: str
    default: str | None
    """As YAML writes it; None: it has to be given."""
    meaning: str


def keys(target: str, prefix: str, *, skip: tuple[str, ...] = ()) -> list[Key]:
    """Return the parameters of a class or function, those of settings in groups in their place.

    Args:
        target: where it is: ``package.module.Name``.
        prefix: put before each name.
        skip: parameters that are no settings.

    Raises:
        ValueError: if a parameter is not in the docstring.
    """
    module, _, name = target.rpartition(".")
    return [key for key in _of(getattr(import_module(module), name), prefix) if key.name not in skip]


def markdown(found: list[Key]) -> str:
    """Return a definition list; every key is an anchor."""
    return "\n\n".join(
        f"[`{key.name}`](#{key.name}){{#{key.name} .key}} <span class='type'>{key.type}"
        + (" · required" if key.default is None else f" · `{key.default}`")
        + f"</span>\n:   {key.meaning}"
        for key in found
    )


def _of(target: Callable[..., Any], prefix: str) -> Iterator[Key]:
    documented = {param.arg_name: param.description or "" for param in parse(inspect.getdoc(target) or "").params}
    for name, parameter in inspect.signature(target, eval_str=True).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not documented.get(name):
            raise ValueError(f"{target.__qualname__} has no word about {name}")
        given = parameter.default is not parameter.empty
        yield Key(
            name=prefix + name,
            type=_type(parameter.annotation),
            default=_yaml(parameter.default) if given else None,
            meaning=_sentence(documented[name]),
        )
        for group in _groups(parameter.annotation):
            yield from _of(group, f"{prefix}{name}.")


def _groups(annotation: Any) -> list[type]:
    return [one for one in _alternatives(annotation) if is_dataclass(one) and isinstance(one, type)]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _type(annotation: Any) -> str:
    """Return what people call a type."""
    words: list[str] = []
    for one in _alternatives(annotation):
        origin, inner = get_origin(one), get_args(one)
        if one is type(None):
            words.append("null")
        elif origin is Literal:
            words += [f"`{value}`" for value in inner]
        elif origin in (list, tuple, dict) or one in (list, tuple, dict):
            words.append("list" if origin is not dict and one is not dict else "map")
        elif is_dataclass(one):
            words.append("group of settings")
        else:
            names = {"str": "text", "int": "number", "float": "number", "bool": "true or false", "Path": "path"}
            words.append(names.get(getattr(one, "__name__", ""), str(getattr(one, "__name__", one))))
    return " or ".join(dict.fromkeys(words))


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return {None: "null", True: "true", False: "false", "": "''"}.get(value, str(value)) if _plain(value) else "group"


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (str, bool, int, float))


def _sentence(text: str) -> str:
    """Return a description as one paragraph that begins with a capital and ends with a full stop."""
    line = " ".join(text.split())
    line = line if line[:1] in "`'\"" else line[:1].upper() + line[1:]
    return line if line.endswith((".", ")")) else line + "."
