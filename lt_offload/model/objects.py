"""Python objects, read and written without running code of their classes.

A dictionary of a library may import what is looked up in it, or make objects of the classes that it holds; a property
may do anything. So containers are read and written by the methods of the built-in type below them, and attributes by
the dictionary and the slots that hold them. What lives in a module of a library belongs to the library.
"""

from __future__ import annotations

import functools
import sys
import types
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import is_dataclass
from operator import is_
from pathlib import Path
from typing import Any, Literal

CONTAINERS = (dict, list, set, deque)
"""Containers that can be written to."""
_READ: dict[type, tuple[Callable[[Any], Any], ...]] = {
    OrderedDict: (OrderedDict.keys, OrderedDict.values),  # in its own order, which ``dict`` does not know
    dict: (dict.keys, dict.values),
    list: (list.__iter__,),
    set: (set.__iter__,),
    deque: (deque.__iter__,),
    tuple: (tuple.__iter__,),
    frozenset: (frozenset.__iter__,),
}
"""The built-in containers, those first that others are a base of, and how they are read."""
Contents = tuple[Collection[Any], ...]
"""Contents of a container: the keys and the values of a dictionary, the items of others."""
NOTHING: Contents = ((),)
"""Contents of an empty container."""

# -- containers ------------------------------------------------------------------------------------------------------


def built_in(container: Any) -> Any:
    """Return the built-in class of a container: methods of a class below it may import, or make objects."""
    cls = type(container)
    return cls if cls in _READ else next(base for base in _READ if issubclass(cls, base))


def read(container: Any) -> Contents:
    """Return what a container holds."""
    if type(container) in _READ and not container:  # nearly all containers of modules
        return NOTHING
    return tuple(list(part(container)) for part in _READ[built_in(container)])


def unchanged(container: Any, contents: Contents) -> bool:
    """Return whether a container holds the very objects of ``contents``, in the same order."""
    if contents is NOTHING and type(container) in _READ:
        return not container
    now = read(container)
    # A set that was filled again may have the same objects in another order.
    if issubclass(type(container), set):
        return set(map(id, now[0])) == set(map(id, contents[0]))
    return same(now[0], contents[0]) and same(now[-1], contents[-1])


def write(container: Any, contents: Contents) -> None:
    """Make a container hold ``contents``."""
    kind = built_in(container)
    kind.clear(container)
    if kind is OrderedDict:  # its ``update`` calls the ``__setitem__`` of a class below it
        for key, value in zip(contents[0], contents[-1], strict=True):
            OrderedDict.__setitem__(container, key, value)
    elif kind is dict:
        dict.update(container, zip(contents[0], contents[-1], strict=True))
    elif kind is set:
        set.update(container, contents[0])
    else:
        kind.extend(container, contents[0])


def same(left: Collection[Any], right: Collection[Any]) -> bool:
    """Return whether two collections hold the very same objects in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))


# -- attributes ------------------------------------------------------------------------------------------------------


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """Return the dictionary that holds the attributes of ``thing``, None if there is none."""
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def held_by(thing: Any) -> list[Any]:
    """Return what the attributes and slots of ``thing`` hold."""
    held = list((attributes_of(thing) or {}).values())
    for member in (member for cls in type(thing).__mro__ for member in vars(cls).values()):
        if type(member) is types.MemberDescriptorType:
            with suppress(AttributeError):  # nothing is there
                held.append(member.__get__(thing))
    return held


# -- libraries -------------------------------------------------------------------------------------------------------


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module was installed and is not the user's own."""
    module = module or "builtins"
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("lt_offload", "torch"):
        return True
    namespaces = (attributes_of(sys.modules.get(name)) or {} for name in (top, module))
    files = (Path(held["__file__"]) for held in namespaces if held.get("__file__"))
    # Installed for the system or for the user, too: a virtual environment may see those libraries.
    return not {"site-packages", "dist-packages"}.isdisjoint(next(files, Path()).parts)


# -- what holds others -----------------------------------------------------------------------------------------------

Kind = Literal["container", "tuple", "settings"]
_MOST = 1000
"""Items of a container below an object of settings; larger ones are data."""


@functools.lru_cache(1024)
def _kind_of(cls: type) -> Kind | None:
    if issubclass(cls, (*CONTAINERS, tuple)):
        return "tuple" if issubclass(cls, tuple) else "container"
    if not cls.__dictoffset__ or issubclass(cls, type):
        return None
    named = (
        issubclass(cls, (types.SimpleNamespace, Namespace, UserDict, UserList))
        or is_dataclass(cls)
        or cls.__name__.endswith("Config")
    )
    return "settings" if named or not any(is_library(base.__module__) for base in cls.__mro__[:-1]) else None


def kind_of(value: Any) -> Kind | None:
    """Return what ``value`` is as far as it holds others: settings are namespaces, dataclasses, configs, users' own."""
    return _kind_of(type(value))  # type: ignore[arg-type]


def holders(values: Iterable[Any], seen: dict[int, Any] | None = None) -> list[tuple[Any, Any, Contents]]:
    """Return the containers and settings at and below ``values``: each, what of it is written to, and what that holds.

    What is written to is the container itself or the dictionary of an object's attributes; of a container that has
    attributes, too, first the one and then the other. Objects of libraries are left alone. What is in ``seen``, by
    identity, is not looked at again.
    """
    seen = {} if seen is None else seen
    kinds: Any = _kind_of  # and not ``kind_of``: this is done for every block of a step, and calls are what it costs
    held: list[tuple[Any, Any, Contents]] = []
    waiting = [value for value in values if kinds(type(value))]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        kind = kinds(type(value))
        places = [value] if kind != "settings" else []
        attributes = None if kind == "tuple" or type(value) in _READ else attributes_of(value)
        if attributes or (kind == "settings" and attributes is not None):
            places.append(attributes)
        for place in places:
            contents = read(place)
            if kind != "tuple":
                held.append((value, place, contents))
            if contents is not NOTHING:
                below = (item for item in contents[-1] if kinds(type(item)))
                if kind == "settings":
                    below = (item for item in below if kind_of(item) == "settings" or len(read(item)[0]) <= _MOST)
                waiting += below
    return held
