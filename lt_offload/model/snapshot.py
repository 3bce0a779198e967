"""What Python objects hold, remembered so that a run that only measures leaves no trace.

Counters, lists, generators and tensors that a training step changes lie anywhere below the module: in attributes, in
containers, in closures, in globals of the user's own code. They are searched breadth first, copied one level each, and
written back in place if they have changed. What can be seen to change but not be written back is refused by name.
"""

from __future__ import annotations

import functools
import gc
import io
import random
import sys
import sysconfig
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from operator import is_, length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.errors import UnsupportedError

MOST = 1_000_000
"""Objects that are looked at: about three seconds."""
LARGEST = 256 << 20
"""Bytes of a tensor or array that is copied; of a larger tensor only the version is remembered."""

_ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), Enum)
_ATOMS += (types.BuiltinFunctionType,)
_ATOMS += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_MACHINERY = {"Trainer", "Fabric", "Strategy", "Logger", "Callback", "Loop", "_Loop", "Accelerator"}
"""Lightning's classes whose objects belong to the Trainer: a training step alone does not change them."""
_OPAQUE: tuple[str, ...] = (
    "lt_offload.",
    "torch._",
    "torch.jit.",
    "torch.fx.",
    "torch.cuda.",
    "torch.distributed.",
    "lightning_utilities.",
)
_OPAQUE += tuple(f"{name}." for name in ("threading", "_thread", "queue", "concurrent", "multiprocessing", "asyncio"))
_OPAQUE += tuple(
    f"{name}." for name in ("logging", "subprocess", "socket", "weakref", "re", "pathlib", "inspect", "typing")
)
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Kept:
    """One thing that was remembered."""

    path: str
    restore: Callable[[], bool]
    """Writes back what has changed; returns False if it has changed and cannot be written back."""


class ObjectSnapshot:
    """The state of everything below some objects.

    Args:
        **roots: the objects, by the names that errors shall have for them.
    """

    def __init__(self, **roots: Any) -> None:
        self._kept: list[_Kept] = []
        self._seen: dict[int, Any] = {}
        self._next: deque[tuple[Any, str]] = deque((value, name) for name, value in roots.items())
        self.left_out: str | None = None
        """Where the search was given up, if it was."""
        while self._next:
            if len(self._seen) > MOST:
                self.left_out = self._next[0][1]
                break
            self._visit(*self._next.popleft())
        self._next.clear()

    def restore(self) -> None:
        """Write back what has changed.

        Raises:
            UnsupportedError: if something has changed that cannot be written back; all else is.
        """
        lost = list(dict.fromkeys(_spoken(kept.path) for kept in self._kept if not kept.restore()))
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise UnsupportedError(
                f"{lost[0]}{more} changes when the training step runs, and lt_offload, which runs it once more to "
                "measure it, cannot undo that; change it outside of the step (in Lightning: in on_train_batch_start)"
            )

    def _keep(self, path: str, restore: Callable[[], bool]) -> None:
        self._kept.append(_Kept(path, restore))

    def _visit(self, thing: Any, path: str) -> None:
        if isinstance(thing, _ATOMS) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing  # kept alive, so that no other object can have its address
        if isinstance(thing, Tensor):
            self._tensor(thing, path)
        elif isinstance(thing, type):
            self._class(thing, path)
        elif isinstance(thing, types.ModuleType):
            return
        elif isinstance(
            thing, (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)
        ):
            self._code(thing, path)
        elif (restore := generator_state(thing)) is not None:
            self._keep(path, restore)
        elif isinstance(thing, np.ndarray):
            self._array(thing, path)
        elif isinstance(thing, io.IOBase) or hasattr(type(thing), "__next__"):
            self._stream(thing, path)
        elif not _is_opaque(thing):
            self._container(thing, path)
            self._attributes(thing, path)

    # -- tensors and arrays ------------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor, path: str) -> None:
        if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
            return
        if isinstance(tensor, nn.Parameter) or tensor.nbytes > LARGEST or tensor.layout != torch.strided:
            known = version(tensor)
            self._keep(path, lambda: version(tensor) == known)
            return
        data = tensor.data
        copy = data.clone()

        def restore() -> bool:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            if not torch.equal(data, copy):
                with torch.inference_mode(data.is_inference()):
                    data.copy_(copy)
            return True

        self._keep(path, restore)

    def _array(self, array: np.ndarray[Any, Any], path: str) -> None:
        if array.dtype.hasobject:
            self._push((array.tolist() if array.size <= MOST else ()), path)
        elif array.flags.writeable and array.nbytes <= LARGEST:
            copy = array.copy()

            def restore() -> bool:
                if array.tobytes() != copy.tobytes():
                    array[...] = copy
                return True

            self._keep(path, restore)

    # -- containers and objects --------------------------------------------------------------------------------------

    def _container(self, thing: Any, path: str) -> None:
        if isinstance(thing, dict):
            self._dictionary(thing, path)
        elif isinstance(thing, (list, deque)):
            items = list(thing)
            base = list if isinstance(thing, list) else deque
            self._keep(path, lambda: _refill(thing, items, base.clear, base.extend))
            self._push(items, path)
        elif isinstance(thing, set):
            members = set(thing)

            def restore() -> bool:
                if thing != members:
                    set.clear(thing)
                    set.update(thing, members)
                return True

            self._keep(path, restore)
            self._push(members, path)
        elif isinstance(thing, bytearray):
            content = bytes(thing)

            def rewrite() -> bool:
                thing[:] = content
                return True

            self._keep(path, rewrite)
        elif isinstance(thing, (tuple, frozenset)):
            self._push(thing, path)
        elif isinstance(thing, types.MappingProxyType):
            self._push(thing.values(), path)

    def _dictionary(self, held: dict[Any, Any], path: str, skip: tuple[str, ...] = ()) -> None:
        before = dict(held)
        base = OrderedDict if isinstance(held, OrderedDict) else dict

        def restore() -> bool:
            if not same(held, before) or not same(held.values(), before.values()):
                base.clear(held)
                base.update(held, before)
            return True

        self._keep(path, restore)
        for name, value in before.items():
            if name not in skip and not isinstance(value, _ATOMS):
                self._next.append((value, f"{path}.{name}" if isinstance(name, str) else f"{path}[...]"))

    def _attributes(self, thing: Any, path: str) -> None:
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            # Weights and their optimizer states are no business of a step that only computes a loss.
            skip = ("state",) if isinstance(thing, Optimizer) else ("_trainer", "_fabric")
            self._dictionary(own, path, skip)
        for cls in type(thing).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                hidden = name.startswith("__") and not name.endswith("__")
                if hidden or not name.startswith("__"):
                    self._slot(thing, f"_{cls.__name__.lstrip('_')}{name}" if hidden else name, path)
        self._visit(type(thing), type(thing).__name__)

    def _slot(self, thing: Any, name: str, path: str) -> None:
        before = getattr(thing, name, _MISSING)

        def restore() -> bool:
            if getattr(thing, name, _MISSING) is not before:
                if before is _MISSING:
                    object.__delattr__(thing, name)
                else:
                    object.__setattr__(thing, name, before)
            return True

        self._keep(f"{path}.{name}", restore)
        if before is not _MISSING:
            self._next.append((before, f"{path}.{name}"))

    def _class(self, cls: type, path: str) -> None:
        """Remember what a class of the user's own has beside its methods."""
        for owner in cls.__mro__:
            if is_library(owner.__module__) or (owner is not cls and id(owner) in self._seen):
                continue
            self._seen[id(owner)] = owner
            before = {name: value for name, value in vars(owner).items() if not name.startswith(("__", "_abc_"))}
            self._keep(path, functools.partial(_restore_class, owner, before))
            self._next.extend((value, f"{owner.__name__}.{name}") for name, value in before.items())

    def _code(self, thing: Any, path: str) -> None:
        if isinstance(thing, types.MethodType):
            self._next.extend([(thing.__self__, path), (thing.__func__, path)])
        elif isinstance(thing, functools.partial):
            self._next.extend([(thing.func, path), (thing.args, path), (thing.keywords, path)])
        elif isinstance(thing, property):
            self._next.append((thing.fget, path))
        elif isinstance(thing, (staticmethod, classmethod)):
            self._next.append((thing.__func__, path))
        else:
            self._function(thing, path)

    def _function(self, function: types.FunctionType, path: str) -> None:
        if f"{function.__module__}.".startswith(_OPAQUE):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                self._slot(cell, "cell_contents", f"{path}.{name}")
        self._push(function.__defaults__ or (), path)
        self._push((function.__kwdefaults__ or {}).values(), path)
        if vars(function):
            self._dictionary(vars(function), path)
        if not is_library(function.__module__):
            mentioned = set(names_in(function.__code__))
            self._bindings(function.__globals__, mentioned)
            for name in mentioned:
                module = function.__globals__.get(name)
                if isinstance(module, types.ModuleType) and not is_library(module.__name__):
                    self._bindings(vars(module), mentioned)

    def _bindings(self, variables: dict[str, Any], names: set[str]) -> None:
        """Remember the global variables that code of the user's own mentions."""
        before = {name: variables.get(name, _MISSING) for name in names if not name.startswith("__")}

        def restore() -> bool:
            for name, value in before.items():
                if variables.get(name, _MISSING) is not value:
                    if value is _MISSING:
                        del variables[name]
                    else:
                        variables[name] = value
            return True

        self._keep(str(variables.get("__name__")), restore)
        self._next.extend((value, name) for name, value in before.items() if value is not _MISSING)

    # -- what goes one way -------------------------------------------------------------------------------------------

    def _stream(self, thing: Any, path: str) -> None:
        """Iterators and files: their position can be seen, that of a file can be set."""
        if isinstance(thing, io.IOBase):
            begin = position(thing)
            if begin is not None and thing not in (sys.stdout, sys.stderr):
                self._keep(path, lambda: position(thing) in (begin, None) or seek_back(thing, begin))
            return
        before, held = progress(thing), gc.get_referents(thing)  # variables of generators, iterators below enumerate
        self._keep(path, lambda: progress(thing) == before and same(gc.get_referents(thing), held))
        self._push(held, path)
        self._attributes(thing, path)

    def _push(self, things: Any, path: str) -> None:
        if {*map(type, things)} <= {int, float, bool, str, bytes, type(None)}:  # at the speed of C: rows of numbers
            return
        self._next.extend((thing, path) for thing in things if not isinstance(thing, _ATOMS))


def _spoken(path: str) -> str:
    """Return ``path`` without the dictionaries in which modules have their parts."""
    return path.replace("._modules", "").replace("._parameters", "").replace("._buffers", "")


def version(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been written to; inference tensors have no count, and are never trained."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def untouched(*, devices: Sequence[int] = (), **roots: Any) -> Iterator[None]:
    """Leave ``roots``, everything below them, and Python's, NumPy's and torch's generators as they are.

    Args:
        devices: CUDA devices whose generators are meant as well.
        **roots: objects, by the names that errors shall have for them.

    Raises:
        UnsupportedError: afterwards, if something has changed that cannot be written back.
    """
    before = ObjectSnapshot(**roots)
    if before.left_out is not None:
        warnings.warn(
            f"lt_offload: there are more than {MOST} objects at and below {_spoken(before.left_out)}; what the step "
            "changes there while it is measured is not undone",
            stacklevel=3,
        )
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    except BaseException as error:
        try:
            before.restore()
        except UnsupportedError as second:
            if not isinstance(error, UnsupportedError):
                error.add_note(str(second))
        raise
    else:
        before.restore()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _refill(
    thing: Any, items: list[Any], clear: Callable[[Any], None], extend: Callable[[Any, list[Any]], None]
) -> bool:
    if not same(thing, items):
        clear(thing)
        extend(thing, items)
    return True


def _restore_class(cls: type, before: dict[str, Any]) -> bool:
    now = {name for name in vars(cls) if not name.startswith(("__", "_abc_"))}
    for name in now - before.keys():
        delattr(cls, name)
    for name, value in before.items():
        if vars(cls).get(name, _MISSING) is not value:
            setattr(cls, name, value)
    return True


def _is_opaque(thing: Any) -> bool:
    cls = type(thing)
    if f"{cls.__module__}.".startswith(_OPAQUE):
        return True
    return not isinstance(thing, nn.Module) and any(
        base.__name__ in _MACHINERY and base.__module__.startswith(("lightning.", "pytorch_lightning."))
        for base in cls.__mro__
    )


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
    except Exception:  # ``length_hint`` runs code of the iterator's own class, which may raise anything
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
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)
