"""Arguments of public functions and settings, checked by their declarations: names, and types.

Sizes, counts and choices are left to the functions: their errors say more than a type can.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from lt_offload.errors import ConfigError
from lt_offload.suggest import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {bool: "True or False", float: "a number", Callable: "a function", Mapping: "a mapping", NoneType: "None"}
_SHOWN = 80
"""Characters of a value in an error."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` refuse arguments that its signature does not have, or not of their type, before it is called.

    The error about a name tells the nearest one (``TypeError``), the one about a type what may be given
    (``ConfigError``).
    """
    signature = inspect.signature(function)
    known = [name for name in signature.parameters if name != "self"]
    takes_others = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known and not takes_others:
                owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
                raise TypeError(f"{owner} has no option {name!r}{hint}")
        check_types(function, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return call


def check_types(declared: Any, values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for the first of ``values`` that is not of its type in a function or a class."""
    types = _types(declared)
    for name, value in values.items():
        classes = types.get(name)
        if classes is not None and not (bool in classes if isinstance(value, bool) else isinstance(value, classes)):
            raise ConfigError(f"{name}={shown(value)} must be {_words(classes)}")


def shown(value: object) -> str:
    """Return ``value`` for an error, in one line: only its type where that would be long."""
    text = repr(value)
    return text if len(text) <= _SHOWN and "\n" not in text else f"<{type(value).__name__}>"


class _Names(dict[str, Any]):
    """The names of a module; one that only type checkers import stands for any type."""

    def __missing__(self, name: str) -> Any:
        return Any


@cache
def _types(declared: Any) -> dict[str, tuple[Any, ...]]:
    """Return the classes that each argument or field may have, where its declaration is of nothing but classes."""
    names = _Names(vars(builtins) | vars(sys.modules[declared.__module__]))
    hints = get_type_hints(inspect.unwrap(declared), {}, names)
    types = {name: _classes(hint) for name, hint in hints.items() if name != "return"}
    return {name: classes for name, classes in types.items() if classes is not None}


def _classes(hint: Any) -> tuple[Any, ...] | None:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    classes = [get_origin(member) or member for member in members]
    if any(each in (int, Literal, Any) or not isinstance(each, type) for each in classes):
        return None
    return (*classes, int) if float in classes else tuple(classes)


def _words(classes: tuple[Any, ...]) -> str:
    """Return what may be given, for an error."""
    named = {each: _WORDS.get(each) or _called(each) for each in classes if each is not int}
    if str in named:
        named[str] = "a path" if named.pop(Path, None) else "a name"
    *others, last = named.values()
    return f"{', '.join(others)} or {last}" if others else last


def _called(each: type) -> str:
    return f"{'an' if each.__name__[0] in 'AEIOU' else 'a'} {each.__name__}"
