"""Contents of the user's objects, remembered so that a run that only measures leaves no trace in them.

Such a run is asked for (``profile``, ``batch_size="auto"``, a batch to plan for). It may count, collect and draw: what
modules, containers, settings and objects of users' own classes hold is searched, copied one level each, and written
back in place if it has changed. Nothing of a library is written to, nor are globals and classes. A change that can be
seen but not be undone is refused by name. No code of the objects runs meanwhile (:mod:`lt_offload.model.objects`).
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.compat.lightning import OWNERS
from lt_offload.compat.torch import MODULE_PARTS, DisableTorchFunctionSubclass, tensor_hooks_of, version_of
from lt_offload.errors import UnsupportedError
from lt_offload.model.objects import attributes_of, kind_of, read, same, unchanged, write
from lt_offload.model.state.generators import generators_kept, is_generator, set_state, state_of

LARGEST = 256 << 20
"""Bytes of a tensor or array that is copied; of a larger tensor only the version is remembered."""
_MOST = 100_000
"""Items of a container; those of larger ones are data, which no step changes."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType)

_Kept = tuple[str, Callable[[], object]]
"""A path, and what writes back a change there; that returns True where there is one that cannot be undone."""


@contextmanager
def untouched(*, devices: Sequence[int] = (), **roots: Any) -> Iterator[None]:
    """Leave ``roots``, users' objects below them, and Python's, NumPy's and torch's generators as they are.

    Errors name ``roots`` as they are named here; ``devices`` of CUDA have generators that are meant as well. Raises
    ``UnsupportedError`` afterwards, if something has changed that cannot be written back; all else is.
    """
    kept = list(_remembered(roots))
    try:
        with generators_kept(devices):
            yield
    except BaseException as error:
        # The first error says what went wrong; that it leaves a trace as well is a note to it.
        for refusal in _restored(kept) if not isinstance(error, UnsupportedError) else ():
            error.add_note(str(refusal))
        raise
    for refusal in _restored(kept):
        raise refusal


def version(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been written to; inference tensors have no count, and are never trained."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _restored(kept: Iterable[_Kept]) -> list[UnsupportedError]:
    """Write back what has changed; return an error if something cannot be."""
    lost = list(dict.fromkeys(path for path, restore in kept if restore()))
    if not lost:
        return []
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return [
        UnsupportedError(
            f"{lost[0]}{more} changes when the training step runs, and lt_offload, which runs it once more to "
            "measure it, cannot undo that; change it outside of the step (in Lightning: in on_train_batch_start)"
        )
    ]


def _remembered(roots: dict[str, Any]) -> Iterator[_Kept]:
    """Yield what is at and below ``roots``."""
    # Writes to a model's own weights are refused as they happen (``allowed.py``). Their versions say less:
    # ``register_parametrization``, which PEFT calls in each forward of experts, gives a weight the memory it has.
    models = [root for root in roots.values() if issubclass(type(root), nn.Module)]
    weights = {id(weight): weight for model in models for weight in model.parameters()}
    seen: dict[int, Any] = dict(weights)
    waiting: deque[tuple[Any, str]] = deque((root, name) for name, root in roots.items())
    # The backward of a block that is measured calls the hooks on its weights.
    waiting.extend((tensor_hooks_of(weight), "hooks") for weight in weights.values())
    tops = set(map(id, roots.values()))
    while waiting:
        thing, path = waiting.popleft()
        # ``issubclass`` of the type, never ``isinstance``: that asks the object for ``__class__``, which may be a
        # property with code of the user's.
        kind = type(thing)
        if issubclass(kind, _ATOMS) or id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept alive, so that no other object can have its address
        below: Iterable[tuple[Any, str]] = ()
        if issubclass(kind, (types.MethodType, functools.partial)):
            below = ((held, path) for held in gc.get_referents(thing))
        elif issubclass(kind, types.FunctionType):
            cells = [cell for cell in thing.__closure__ or () if gc.get_referents(cell)]  # others are empty yet
            below = ((cell.cell_contents, path) for cell in cells)
        elif issubclass(kind, Tensor):
            yield path, _tensor(thing)
        elif issubclass(kind, np.ndarray):
            yield path, _array(thing)
        elif is_generator(thing):
            yield path, functools.partial(set_state, thing, state_of(thing))
        elif issubclass(kind, io.IOBase) or _advances(kind):
            yield path, functools.partial(_went_on, thing, *_progress(thing))
            below = ((held, path) for held in gc.get_referents(thing))
        else:
            modules = issubclass(kind, (nn.Module, Optimizer)) or id(thing) in tops
            places = [thing] if kind_of(thing) in ("container", "tuple") or kind is frozenset else []
            if (modules or kind_of(thing) == "settings") and attributes_of(thing):
                places.append(attributes_of(thing))
            for place in places:
                contents = read(place)
                if not issubclass(type(place), (tuple, frozenset)):
                    yield path, functools.partial(_refill, place, contents)
                if len(contents[-1]) <= _MOST:
                    below = [*below, *_named(contents, path, kind if place is not thing else None)]
        waiting.extend(below)


def _named(contents: Any, path: str, owner: type | None) -> Iterator[tuple[Any, str]]:
    """Yield items of a container, or of the attributes of an object of class ``owner``, with their paths."""
    # Optimizer states are no business of a step that only computes a loss.
    skip = () if owner is None else ("state",) if issubclass(owner, Optimizer) else OWNERS
    for name, value in zip(contents[0], contents[-1], strict=True):
        if type(name) is not str or len(contents) == 1:
            yield value, path
        elif name not in skip:
            plain = name in MODULE_PARTS and owner is not None
            yield value, path if plain else f"{path}.{name}"


def _tensor(tensor: Tensor) -> Callable[[], object]:
    with DisableTorchFunctionSubclass():
        # A step that computes a loss has no reason to write to weights; that it has not is all that is looked at, as
        # copies would take as much memory as the model. Tensors of other classes keep their numbers elsewhere.
        plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout == torch.strided
        if not plain or tensor.is_meta or issubclass(type(tensor), nn.Parameter) or tensor.nbytes > LARGEST:
            known = version(tensor)
            return lambda: version(tensor) != known
        data = tensor.data
        copy = data.clone()

    def restore() -> None:
        with DisableTorchFunctionSubclass():
            # A step may have given the tensor other memory (``tensor.data = ...``) as well as written to it.
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            if not torch.equal(data, copy):
                # Torch lets inference tensors be written to in that mode only.
                with torch.inference_mode(data.is_inference()):
                    data.copy_(copy)

    return restore


def _array(held: np.ndarray[Any, Any]) -> Callable[[], object]:
    array = np.ndarray.view(held, np.ndarray)  # without the methods of a class below it
    copy = array.copy() if array.flags.writeable and array.nbytes <= LARGEST else None

    def restore() -> None:
        if copy is not None and array.tobytes() != copy.tobytes():
            array[...] = copy

    return restore


def _refill(container: Any, contents: Any) -> None:
    if not unchanged(container, contents):
        write(container, contents)


# -- what goes one way -------------------------------------------------------------------------------------------------


def _advances(kind: type) -> bool:
    """Return whether ``kind`` is an iterator that does not keep its position in attributes: one written in C."""
    steps = (vars(cls).get("__next__") for cls in kind.__mro__)
    return any(type(step) is types.WrapperDescriptorType for step in steps)


def _progress(thing: Any) -> tuple[object, list[Any]]:
    """Return something that changes when an iterator or a file is advanced, as far as that can be seen."""
    held = gc.get_referents(thing)  # variables of generators, iterators below enumerate
    if thing is sys.stdout or thing is sys.stderr:
        return None, []
    with suppress(OSError, ValueError, TypeError):  # a text that is being read, a file that is closed, no end
        if issubclass(type(thing), io.IOBase):
            return thing.tell(), []
        if type(thing) is types.GeneratorType:
            return thing.gi_frame and thing.gi_frame.f_lasti, held
        return repr(thing) if type(thing) is itertools.count else operator.length_hint(thing, -1), held
    return None, held


def _went_on(thing: Any, before: object, held: list[Any]) -> bool:
    now, holds = _progress(thing)
    return now != before or not same(holds, held)
