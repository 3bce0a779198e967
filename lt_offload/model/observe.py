"""What can be seen of objects from outside: where generators, iterators and files are, and whose code is whose."""

from __future__ import annotations

import functools
import io
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator
from operator import is_, length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch


def generator_state(thing: Any) -> Callable[[], bool] | None:
    """Return what brings a generator of random numbers back to where it is; None if ``thing`` is none."""
    back: Callable[[], object]
    if isinstance(thing, torch.Generator):
        back = functools.partial(thing.set_state, thing.get_state())
    elif isinstance(thing, random.SystemRandom):
        return lambda: True
    elif isinstance(thing, random.Random):
        back = functools.partial(thing.setstate, thing.getstate())
    elif isinstance(thing, np.random.RandomState):
        back = functools.partial(thing.set_state, thing.get_state())
    elif isinstance(thing, np.random.Generator):
        return generator_state(thing.bit_generator)
    elif isinstance(thing, np.random.BitGenerator):
        back = functools.partial(setattr, thing, "state", thing.state)
    else:
        return None

    def restore() -> bool:
        back()
        return True

    return restore


def progress(iterator: Any) -> object:
    """Return something that changes when ``iterator`` is advanced, as far as that can be seen from outside."""
    if isinstance(iterator, types.GeneratorType):
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    shown = repr(iterator) if type(iterator).__module__ == "itertools" else ""  # shows where count and repeat are
    try:
        return length_hint(iterator, -1), shown
    except Exception:  # whatever a foreign iterator raises when it is asked how long it is
        return shown


def same(left: Collection[Any], right: Collection[Any]) -> bool:
    """Return whether two collections hold the very same objects in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))


def position(file: io.IOBase) -> int | None:
    """Return where ``file`` is, None if it does not tell."""
    try:
        return None if file.closed or not file.seekable() else file.tell()
    except (OSError, ValueError):  # text that is being iterated over does not tell
        return None


def seek_back(file: io.IOBase, position: int) -> bool:
    """Bring ``file`` back to ``position``; return False for one that something was written to."""
    if file.writable() and not isinstance(file, (io.BytesIO, io.StringIO)):
        return False
    file.seek(position)
    if file.writable():
        file.truncate()
    return True


def names_in(code: types.CodeType) -> Iterator[str]:
    """Return the names of global variables and attributes that ``code`` mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module was installed and is not the user's own."""
    top = (module or "builtins").partition(".")[0]
    if top in sys.stdlib_module_names or top == "lt_offload":
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(file).is_relative_to(place) for place in places)
