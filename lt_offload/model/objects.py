"""Python objects, read and written without running code of their classes.

A dictionary of a library may import what is looked up in it, or make objects of the classes that it holds; a property
may do anything. So containers are read and written by the methods of the built-in type below them, and attributes by
the dictionary and the slots that hold them. What lives in a module of a library belongs to the library.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator
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

own: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
"""The attributes that a class itself has, whatever its metaclass says."""
bases: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""A class and its bases, in the order in which attributes are looked up."""
name_of: Callable[[type], str] = type.__dict__["__name__"].__get__
"""The name of a class."""
_module_of: Callable[[type], Any] = type.__dict__["__module__"].__get__


def module_of(cls: type) -> str:
    """Return the name of the module that ``cls`` says it is from; "" if it says something else."""
    try:
        module = _module_of(cls)
    except AttributeError:
        return ""
    return module if isinstance(module, str) else ""


# -- containers ------------------------------------------------------------------------------------------------------


def _built_in(container: Any) -> type:
    cls = type(container)
    return cls if cls in _READ else next(base for base in _READ if issubclass(cls, base))


def read(container: Any) -> Contents:
    """Return what a container holds."""
    if type(container) in _READ and not container:  # nearly all containers of modules
        return NOTHING
    return tuple(list(part(container)) for part in _READ[_built_in(container)])


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
    kind: Any = _built_in(container)
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


def item_of(container: Any, key: Any) -> Any:
    """Return an item of a dictionary or list."""
    kind: Any = _built_in(container)
    return kind.__getitem__(container, key)


def set_item(container: Any, key: Any, value: Any) -> None:
    """Set an item of a dictionary or list."""
    kind: Any = _built_in(container)
    kind.__setitem__(container, key, value)


def same(left: Collection[Any], right: Collection[Any]) -> bool:
    """Return whether two collections hold the very same objects in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))


# -- attributes ------------------------------------------------------------------------------------------------------


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """Return the dictionary that holds the attributes of ``thing``, None if there is none."""
    for base in bases(type(thing)):
        descriptor: Any = own(base).get("__dict__")
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            attributes = descriptor.__get__(thing)
            return attributes if issubclass(type(attributes), dict) else None
    return None


def slots_of(thing: Any) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """Yield the slots of ``thing``, each with what gets and sets it."""
    for cls in bases(type(thing)):
        slots = own(cls).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else read(slots)[0] if issubclass(type(slots), tuple(_READ)) else ()
        for name in names:
            mangled = f"_{name_of(cls).lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            descriptor = own(cls).get(mangled)
            if type(descriptor) is types.MemberDescriptorType:
                yield mangled, descriptor


def held_by(thing: Any) -> list[Any]:
    """Return what the attributes and slots of ``thing`` hold."""
    held = list((attributes_of(thing) or {}).values())
    for _, slot in slots_of(thing):
        with suppress(AttributeError):  # nothing is there
            held.append(slot.__get__(thing))
    return held


# -- libraries -------------------------------------------------------------------------------------------------------


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module was installed and is not the user's own."""
    module = module or "builtins"
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "lt_offload":
        return True
    namespaces = (attributes_of(sys.modules.get(name)) or {} for name in (top, module))
    file = next((str(held["__file__"]) for held in namespaces if held.get("__file__")), None)
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)


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
        or name_of(cls).endswith("Config")
    )
    return "settings" if named or not any(is_library(module_of(base)) for base in bases(cls)[:-1]) else None


def kind_of(value: Any) -> Kind | None:
    """Return what ``value`` is as far as it holds others: settings are namespaces, dataclasses, configs, users' own."""
    return _kind_of(type(value))  # type: ignore[arg-type]


def holders(values: Iterable[Any], seen: dict[int, Any] | None = None) -> list[tuple[Any, Any, Contents]]:
    """Return the containers and settings at and below ``values``: each, what of it is written to, and what that holds.

    What is written to is the container itself or the dictionary of an object's attributes; of a container that has
    attributes, too, first the one and then the other. Objects of libraries are left alone.

    Args:
        values: where the search begins.
        seen: what has been looked at, by identity; is added to, and not looked at again.
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
                waiting += below if kind != "settings" else (item for item in below if _is_small(item))
    return held


def _is_small(value: Any) -> bool:
    return kind_of(value) == "settings" or len(read(value)[0]) <= _MOST
