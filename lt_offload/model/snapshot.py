"""Contents of Python objects, remembered so that a run that only measures leaves no trace.

Counters, lists, generators and tensors that a training step changes lie anywhere below the module: in attributes, in
containers, in closures, in globals of the user's own code. They are searched breadth first, copied one level each, and
written back in place if they have changed. A change that can be seen but not be undone is refused by name. No
code of the objects runs meanwhile (:mod:`lt_offload.model.objects`), and what belongs to a library is left alone.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.compat.lightning import LOOP, OWNERS
from lt_offload.compat.torch import DisableTorchFunctionSubclass, tensor_hooks_of, version_of
from lt_offload.errors import UnsupportedError
from lt_offload.model import objects
from lt_offload.model.objects import Contents, attributes_of, bases, is_library, module_of, name_of, own, same
from lt_offload.model.state.generators import generators_kept, is_generator, set_state, state_of

MOST = 1_000_000
"""Objects that are looked at: about three seconds."""
LARGEST = 256 << 20
"""Bytes of a tensor or array that is copied; of a larger tensor only the version is remembered."""

_ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), Enum)
_ATOMS += (types.BuiltinFunctionType,)
_ATOMS += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_MACHINERY = {"Trainer", "Fabric", "Strategy", "Logger", "Callback", "Loop", LOOP, "Accelerator"}
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
_CODE = (types.MethodType, functools.partial, staticmethod, classmethod, property)
_CELL = own(types.CellType)["cell_contents"]
_NUMBERS = frozenset(map(id, (int, float, bool, str, bytes, type(None))))
_STREAM: type = bases(io.IOBase)[1]
_ABSTRACT_STREAMS = ("IOBase", "RawIOBase", "BufferedIOBase", "TextIOBase")


class _NoItems:
    def __getitem__(self, index: int) -> int:
        raise IndexError


_OVER_SEQUENCES = (reversed, type(iter(_NoItems())))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A thing that was remembered, and how to write it back."""

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
        # Writes to a model's own weights are refused as they happen (``boundary_check.py``). Their versions say less:
        # ``register_parametrization``, which PEFT calls in each forward of experts, gives a weight the memory it has.
        models = {name: root for name, root in roots.items() if issubclass(type(root), nn.Module)}
        weights = {f"{name}.{path}": weight for name in models for path, weight in models[name].named_parameters()}
        self._seen: dict[int, Any] = {id(weight): weight for weight in weights.values()}
        # Breadth first: where the search is given up, what is left out lies deepest.
        self._next: deque[tuple[Any, str]] = deque((value, name) for name, value in roots.items())
        # The backward of a block that is measured calls the hooks on its weights.
        self._next.extend((tensor_hooks_of(weight), f"hooks of {path}") for path, weight in weights.items())
        self.left_out: str | None = None
        """The path at which the search was given up, if it was."""
        objects.look_again()
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
        # ``issubclass`` of the type, never ``isinstance``: that asks the object for ``__class__``, which may be a
        # property with code of the user's.
        kind = type(thing)
        if issubclass(kind, _ATOMS) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing  # kept alive, so that no other object can have its address
        if issubclass(kind, type):
            self._class(thing, path)
        elif issubclass(kind, types.ModuleType):
            return
        elif issubclass(kind, types.FunctionType):
            self._function(thing, path)
        elif issubclass(kind, _CODE):
            self._push(gc.get_referents(thing), path)
        elif objects.belongs_to_a_library(thing):
            return
        elif issubclass(kind, Tensor):
            self._tensor(thing, path)
        elif is_generator(thing):
            self._keep(path, functools.partial(_rewind, thing, state_of(thing)))
            self._attributes(thing, path)
        elif issubclass(kind, np.ndarray):
            self._array(thing, path)
        elif (base := stream_base(kind)) is not None:
            self._stream(thing, path, base)
        elif _advances(kind):
            self._iterator(thing, path)
        elif not _is_opaque(kind):
            self._container(thing, path)
            self._attributes(thing, path)

    # -- tensors and arrays ------------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor, path: str) -> None:
        with DisableTorchFunctionSubclass():
            weight, wraps = isinstance(tensor, nn.Parameter), _found(type(tensor), "__torch_dispatch__")
            if wraps is not _found(Tensor, "__torch_dispatch__") and not weight:
                if not _is_opaque(type(tensor)):  # its numbers are in tensors among its attributes
                    self._attributes(tensor, path)
                return
            if tensor.is_meta:
                return
            # A step that computes a loss has no reason to write to weights; that it has not is all that is looked at,
            # as copies would take as much memory as the model.
            if weight or tensor.nbytes > LARGEST or tensor.layout != torch.strided:
                known = version(tensor)
                self._keep(path, lambda: version(tensor) == known)
                return
            data = tensor.data
            copy = data.clone()

        def restore() -> bool:
            with DisableTorchFunctionSubclass():
                # A step may have given the tensor other memory (``tensor.data = ...``) as well as written to it.
                if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                    tensor.data = data
                if not torch.equal(data, copy):
                    # Torch lets inference tensors be written to in that mode only.
                    with torch.inference_mode(data.is_inference()):
                        data.copy_(copy)
            return True

        self._keep(path, restore)

    def _array(self, held: np.ndarray[Any, Any], path: str) -> None:
        array = np.ndarray.view(held, np.ndarray)  # without the methods of a class below it
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
        kind = type(thing)
        if issubclass(kind, dict):
            self._dictionary(thing, path)
        elif issubclass(kind, objects.CONTAINERS):
            contents = objects.read(thing)
            self._keep(path, functools.partial(_refill, thing, contents))
            self._push(contents[0], path)
        elif issubclass(kind, bytearray):
            content = bytes(memoryview(thing))

            def rewrite() -> bool:
                bytearray.__setitem__(thing, slice(None), content)
                return True

            self._keep(path, rewrite)
        elif issubclass(kind, (tuple, frozenset)):
            self._push(objects.read(thing)[0], path)
        elif issubclass(kind, types.MappingProxyType):
            for held in gc.get_referents(thing):
                self._push(objects.read(held)[-1] if issubclass(type(held), dict) else [held], path)

    def _dictionary(self, held: dict[Any, Any], path: str, skip: tuple[str, ...] = ()) -> None:
        contents = objects.read(held)
        self._keep(path, functools.partial(_refill, held, contents))
        for name, value in zip(contents[0], contents[-1], strict=True):
            named = type(name) is str
            if not (named and name in skip) and not issubclass(type(value), _ATOMS):
                self._next.append((value, f"{path}.{name}" if named else f"{path}[...]"))

    def _attributes(self, thing: Any, path: str) -> None:
        kind, attributes = type(thing), attributes_of(thing)
        if attributes is not None:
            # Weights and their optimizer states are no business of a step that only computes a loss.
            skip = ("state",) if issubclass(kind, Optimizer) else OWNERS
            self._dictionary(attributes, path, skip)
        for name, slot in objects.slots_of(thing):
            self._slot(thing, slot, f"{path}.{name}")
        self._visit(kind, name_of(kind))

    def _slot(self, thing: Any, slot: Any, path: str) -> None:
        before = _held(slot, thing)

        def restore() -> bool:
            if _held(slot, thing) is not before:
                if before is _MISSING:
                    slot.__delete__(thing)
                else:
                    slot.__set__(thing, before)
            return True

        self._keep(path, restore)
        if before is not _MISSING:
            self._next.append((before, path))

    def _class(self, cls: type, path: str) -> None:
        """Remember what a class of the user's own has beside its methods."""
        for owner in bases(cls):
            # ``cls`` itself is among those seen already: whoever found it has put it there.
            if is_library(module_of(owner)) or (owner is not cls and id(owner) in self._seen):
                continue
            self._seen[id(owner)] = owner
            # ``_abc_``: the caches of abstract classes, which ``isinstance`` fills.
            before = {name: value for name, value in own(owner).items() if not name.startswith(("__", "_abc_"))}
            self._keep(path, functools.partial(_restore_class, owner, before))
            self._next.extend((value, f"{name_of(owner)}.{name}") for name, value in before.items())

    def _function(self, function: types.FunctionType, path: str) -> None:
        if f"{function.__module__}.".startswith(_OPAQUE) or objects.is_part_of_a_library(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._slot(cell, _CELL, f"{path}.{name}")
        self._push(function.__defaults__ or (), path)
        self._push((function.__kwdefaults__ or {}).values(), path)
        if vars(function):
            self._dictionary(vars(function), path)
        if not is_library(function.__module__):
            mentioned = set(names_in(function.__code__))
            self._bindings(function.__globals__, mentioned)
            for name in mentioned:
                module = function.__globals__.get(name)
                if issubclass(type(module), types.ModuleType):
                    variables = attributes_of(module) or {}
                    if not is_library(variables.get("__name__")):
                        self._bindings(variables, mentioned)

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

    def _stream(self, file: Any, path: str, base: Any) -> None:
        """Files: their position can be seen, and set."""
        begin = position(file, base)
        if begin is not None and file is not sys.stdout and file is not sys.stderr:
            self._keep(path, lambda: position(file, base) in (begin, None) or seek_back(file, base, begin))
        if type(file) is not base:
            self._attributes(file, path)

    def _iterator(self, thing: Any, path: str) -> None:
        """Iterators: their position can be seen, often."""
        before, held = progress(thing), gc.get_referents(thing)  # variables of generators, iterators below enumerate
        self._keep(path, lambda: progress(thing) == before and same(gc.get_referents(thing), held))
        self._push(held, path)
        self._attributes(thing, path)

    def _push(self, things: Any, path: str) -> None:
        if _NUMBERS.issuperset(map(id, map(type, things))):  # at the speed of C: rows of numbers
            return
        self._next.extend((thing, path) for thing in things if not issubclass(type(thing), _ATOMS))


def _spoken(path: str) -> str:
    """Return ``path`` without the dictionaries in which modules have their parts."""
    return path.replace("._modules", "").replace("._parameters", "").replace("._buffers", "")


def version(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been written to; inference tensors have no count, and are never trained."""
    return 0 if tensor.is_inference() else version_of(tensor)


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
    try:
        with generators_kept(devices):
            yield
    except BaseException as error:
        try:
            before.restore()
        # The first error says what went wrong; that it leaves a trace as well is a note to it.
        except UnsupportedError as second:
            if not isinstance(error, UnsupportedError):
                error.add_note(str(second))
        raise
    else:
        before.restore()


def _refill(container: Any, contents: Contents) -> bool:
    if not objects.unchanged(container, contents):
        objects.write(container, contents)
    return True


def _rewind(generator: Any, state: Any) -> bool:
    set_state(generator, state)
    return True


def _held(slot: Any, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except (AttributeError, ValueError):  # nothing is in a slot, or in a cell of a closure
        return _MISSING


def _restore_class(cls: type, before: dict[str, Any]) -> bool:
    now = {name for name in own(cls) if not name.startswith(("__", "_abc_"))}
    for name in now - before.keys():
        type.__delattr__(cls, name)
    for name, value in before.items():
        if own(cls).get(name, _MISSING) is not value:
            type.__setattr__(cls, name, value)
    return True


def _found(kind: type, name: str) -> Any:
    """Return the attribute of a class that its objects see."""
    return next((own(cls)[name] for cls in bases(kind) if name in own(cls)), None)


def _advances(kind: type) -> bool:
    """Return whether ``kind`` is an iterator that does not keep its position in attributes."""
    # One written in C has its position inside. Files are iterators, too, but say where they are (``_stream``).
    steps = (own(cls).get("__next__") for cls in bases(kind) if cls is not _STREAM)
    return any(type(step) is types.WrapperDescriptorType for step in steps)


def _is_opaque(kind: type) -> bool:
    if f"{module_of(kind)}.".startswith(_OPAQUE):
        return True
    return not issubclass(kind, nn.Module) and any(
        name_of(base) in _MACHINERY and module_of(base).startswith(("lightning.", "pytorch_lightning."))
        for base in bases(kind)
    )


def progress(iterator: Any) -> object:
    """Return something that changes when ``iterator`` is advanced, as far as that can be seen from outside."""
    if isinstance(iterator, types.GeneratorType):
        # In a loop a generator stops at the same instruction every time: its variables, which the caller compares,
        # differ then.
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    if type(iterator) is itertools.count:
        return repr(iterator)  # shows where it is
    if type(iterator) in _OVER_SEQUENCES:  # their hint asks the sequence for its length
        return iterator.__reduce__()[2:]
    for cls in bases(type(iterator)):
        hint = own(cls).get("__length_hint__")
        if type(hint) is types.MethodDescriptorType:
            with suppress(TypeError):  # ``repeat`` without an end
                return hint(iterator)
    return None


def stream_base(kind: type) -> type | None:
    """Return the class of Python's own whose files objects of ``kind`` are; None if they are none or no more than such.

    A stream that is made from nothing but Python has its position among its attributes.
    """
    if not issubclass(kind, _STREAM):
        return None
    base = next(cls for cls in bases(kind) if module_of(cls).partition(".")[0] in sys.stdlib_module_names)
    return None if name_of(base).strip("_") in _ABSTRACT_STREAMS else base


def position(file: Any, base: Any) -> int | None:
    """Return where ``file``, of a class of ``base``, is; None if it does not tell."""
    try:
        return None if base.closed.__get__(file) or not base.seekable(file) else int(base.tell(file))
    except (OSError, ValueError):  # text that is being iterated over does not tell
        return None


def seek_back(file: Any, base: Any, position: int) -> bool:
    """Bring ``file`` back to ``position``; return False for one that something was written to."""
    writable = base.writable(file)
    if writable and not issubclass(base, (io.BytesIO, io.StringIO)):
        return False
    base.seek(file, position)
    if writable:
        base.truncate(file)
    return True


def names_in(code: types.CodeType) -> Iterator[str]:
    """Return the names of global variables and attributes that ``code`` mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
