"""Users' view of weights and optimizer states outside the blocks: what plain PyTorch would show.

Between two iterations, and between two blocks of a forward, a weight's newest value may be on the device only, or the
host may still be computing it. Two torch modes stand in front of every operation outside the blocks and compare the
storages that it touches with those of the engine's host copies. A read waits for that tensor alone. A write brings the
newest value home first and forgets the device copy. An operation with tensors of a GPU's runs there, as in plain
PyTorch, if it only reads weights and nothing is differentiated. Inside the blocks the modes are off.

The modes belong to the thread that installed the engine. Two ways around them remain. A view of a tensor's memory that
is no tensor (NumPy's) may be read and written unseen: while there is one, the host copy is complete whenever an
iteration has ended, and taken for written when the next begins. And ``param.data_ptr()`` shows whether a parameter was
given other memory.

Not seen is what other threads do while training runs: what they read of weights in flight may be of this step, of the
last one, or in between, and what they write may be lost. Plain PyTorch does not order them with the optimizer either.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload import limits
from lt_offload.compat.torch import FOREACH_COPY, DisableTorchFunctionSubclass, address_of, has_storage, typed_storage
from lt_offload.execute.memory.common import Common
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.machine.dispatch import (
    DISPATCH_MODES,
    OperationMode,
    WatchingMode,
    called_with_care,
    needs_care,
    writes,
)
from lt_offload.machine.zero_copy import zero_copy_view
from lt_offload.model.optimizers import Place, tensor_at, tensors_of

GRADIENT = "p.grad"
"""Stands for the name of a state where the tensor is the sum of a weight's gradients."""


@dataclass(frozen=True, slots=True)
class TrackedTensor:
    """A tensor whose host memory the engine writes: a weight, or an optimizer state or the gradient of one."""

    weight: Weight
    state: Place = None

    @property
    def label(self) -> str:
        """Its name in errors."""
        name = self.weight.label
        if self.state == GRADIENT:
            return f"the gradient of {name}"
        return name if self.state is None else f"optimizer state {self.state!r} of {name}"

    @property
    def groups(self) -> tuple[LiveGroup, ...]:
        """The groups on which its host copy waits; the weight's event stands for its update on the host."""
        if self.state == GRADIENT:
            return (self.weight.total.group,) if self.weight.total is not None else ()
        states = self.weight.states.group
        return (self.weight.group,) if self.state is None or states is None else (self.weight.group, states)


class Guard:
    """Stands between users' code and the tensors of an engine.

    ``check_read`` and ``check_write`` raise if nothing may be read or written now; they are told what was done.
    ``unseen`` are weights whose memory somebody else holds, and may read and write unseen, all the time. ``modes`` were
    placed before, where the guard is installed from within a backward.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        residency: Residency,
        updates: Updates | None,
        check_read: Callable[[str], object],
        check_write: Callable[[str], object],
        unseen: Iterable[Weight] = (),
        common: Common | None = None,
        modes: GuardModes | None = None,
    ) -> None:
        self._common, self._modes = common, modes or GuardModes()
        self._weights, self._residency, self._updates = weights, residency, updates
        self._check_read, self._check_write = check_read, check_write
        self.remote = residency.device.torch_device.type != "cpu"
        """Blocks run on another device than the host."""
        self.suspended = Suspended(self._modes)
        """Context in which the engine itself works, and blocks run."""
        self._of_weights: dict[int | None, TrackedTensor] = {
            address_of(w.host.untyped_storage()): TrackedTensor(w) for w in weights
        }
        self._of_states: dict[int, TrackedTensor] = {}
        self._kept: list[torch.UntypedStorage] = []
        """The storages of ``_of_states``: while they live, nobody else has their addresses."""
        self._generation = -1
        self._views: dict[TrackedTensor, list[weakref.ref[Any]]] = {}
        """Views of host copies that are no tensors (NumPy's), through which they may be read and written unseen."""
        self._unseen = dict.fromkeys(TrackedTensor(weight) for weight in unseen)
        """Host copies that may be read and written unseen until the end."""
        self._addresses = [weight.host.data_ptr() for weight in weights]
        self._tensors: dict[TrackedTensor, list[weakref.ref[Tensor]]] = {}
        """Tensors in a host copy's memory that were made since the last iteration began, or live."""

    # -- on and off --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Begin to watch the operations of the calling thread."""
        self._modes.place()
        self._modes.watch_for(self)
        _installed.add(self)

    def remove(self) -> None:
        """End it; operations of other threads were never seen."""
        _installed.discard(self)
        self._modes.remove()
        self._views.clear()
        self._tensors.clear()
        self._of_states, self._kept = {}, []  # states on the device are moved, or dropped, by others from now on

    # -- what users do -----------------------------------------------------------------------------------------------

    def find(self, tensor: Tensor) -> TrackedTensor | None:
        """Return the weight or optimizer state whose memory ``tensor`` is, or is a view of."""
        # Subclasses may have a __torch_function__ of their own, which must not be called for a question of ours.
        if type(tensor) in _ORDINARY:
            key = address_of(tensor.untyped_storage()) if has_storage(tensor) else 0
        else:
            with DisableTorchFunctionSubclass():
                key = address_of(tensor.untyped_storage()) if has_storage(tensor) else 0
        owned = self._of_weights.get(key)
        if owned is None and self._updates is not None:
            if self._generation != self._updates.generation:
                self._learn_states()
            owned = self._of_states.get(key)
        return owned

    def read(self, owned: Iterable[TrackedTensor]) -> None:
        """Make host copies complete before they are read; refused in the middle of an iteration's updates."""
        for one in owned:
            self._check_read(f"{one.label} was accessed")
            self._residency.bring_home(one.groups)

    def write(self, owned: Iterable[TrackedTensor]) -> None:
        """Make host copies complete and the only ones, before they are written.

        Raises ``UnsupportedError`` while a forward waits for its backward, or in the middle of an iteration's updates.
        """
        written = list(owned)
        # Home first, even what is to be overwritten: the write may be one of a part.
        self.read(written)
        for one in written:
            self._check_write(f"{one.label} was written to")
        # The host copy is about to be newer than any on the device, which nobody would notice there.
        self._residency.forget(dict.fromkeys(group for one in written for group in one.groups))
        self._residency.snapshots.changing(self._memory(one) for one in written)
        if self._common is not None:
            self._common.edited.update(one.weight.index for one in written if one.state == GRADIENT)
            weights = [one.weight for one in written if one.state != GRADIENT]
            self._common.writing(weights, self._residency.bring_home)

    def replace(self, weight: Weight, data: Tensor) -> None:
        """Give ``weight`` the values that were assigned to its parameter; refuses another shape or dtype."""
        if data.shape != weight.host.shape or data.dtype != weight.host.dtype:
            raise limits.CHANGED_PARAMETERS.error(
                f"{weight.label} was given {_describe(data)} in place of {_describe(weight.host)}"
            )
        # The values go into the memory that is there. Whoever shares it would see them, and does not in plain PyTorch.
        if any(alias() is not None for alias in self._tensors.get(TrackedTensor(weight), ()) if alias() is not data):
            raise limits.EXCHANGED_MEMORY.error(f"{weight.label} was given other memory")
        self.write([TrackedTensor(weight)])
        with torch.no_grad():
            weight.host.copy_(data)

    def hand_out(self, owned: TrackedTensor, view: object) -> None:
        """Remember that somebody has a view of a host copy, through which it can be read and written unseen."""
        # From here on it may change without a word, so snapshots take what is there now.
        self._residency.snapshots.changing([self._memory(owned)])
        try:
            self._views.setdefault(owned, []).append(weakref.ref(view))
        except TypeError:  # a capsule of dlpack does not say how long its memory is in use
            self._unseen[owned] = None
        self._complete_common()

    def made(self, owned: TrackedTensor, tensor: Tensor) -> None:
        """Remember a tensor that shares a host copy's memory."""
        self._tensors.setdefault(owned, []).append(weakref.ref(tensor))

    @property
    def held(self) -> bool:
        """True if somebody has a tensor or a view in the memory of a weight or of an optimizer state."""
        self._forget_views()
        return bool(self._tensors or self._views or self._unseen)

    def announced(self) -> Iterator[tuple[torch.UntypedStorage, TrackedTensor]]:
        """Yield the host copies that nobody changes unseen, by their memory."""
        self._forget_views()
        unseen = {*self._views, *self._unseen}
        if self._updates is not None and self._generation != self._updates.generation:
            self._learn_states()
        copies = [(weight.host.untyped_storage(), TrackedTensor(weight)) for weight in self._weights]
        copies += [(storage, self._of_states[address_of(storage)]) for storage in self._kept]
        yield from (item for item in copies if item[1] not in unseen)

    def _memory(self, owned: TrackedTensor) -> Tensor:
        if owned.state is None:
            return owned.weight.host
        if owned.state == GRADIENT:
            assert owned.weight.total is not None
            return owned.weight.total.host
        assert self._updates is not None
        tensor = tensor_at(self._updates.state(owned.weight), owned.state)
        assert tensor is not None
        return tensor

    def show(self, gradients: Iterable[TrackedTensor]) -> None:
        """Watch the host copies of sums of gradients, too."""
        self._of_weights.update((key, owned) for owned in gradients if (key := _sum_memory(owned)) is not None)

    def hide(self, gradients: Iterable[TrackedTensor]) -> None:
        """Watch them no longer."""
        for owned in gradients:
            self._of_weights.pop(_sum_memory(owned), None)
            for known in (self._views, self._tensors, self._unseen):
                known.pop(owned, None)

    def seen_otherwise(self, owned: TrackedTensor) -> bool:
        """Return whether somebody was given a view that is no tensor, through which it may have been written."""
        return owned in self._views or owned in self._unseen

    # -- what the engine tells ---------------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise ``UnsupportedError`` in a thread whose operations are not seen."""
        if threading.get_ident() != self._modes.thread:
            raise limits.OTHER_THREAD.error(f"a training forward ran in thread {threading.current_thread().name}")

    def begin(self) -> None:
        """An iteration begins: adopt what was assigned, if it fits, and what may have been written through views."""
        for weight, address in zip(self._weights, self._addresses, strict=True):
            if weight.host.data_ptr() != address:
                raise limits.EXCHANGED_MEMORY.error(f"{weight.label} was moved to shared memory")
            if weight.param.data_ptr() != address:
                # The parameter goes back to its own memory, into which `replace` copies the values.
                assigned, weight.param.data = weight.param.data, weight.host
                self.replace(weight, assigned)
        # A view that is gone by now may have been written to: it counts once more, and is then forgotten.
        stale = dict.fromkeys(group for owned in (*self._views, *self._unseen) for group in owned.groups)
        stale |= dict.fromkeys(self._replaced_states())
        viewed = [owned.weight for owned in (*self._views, *self._unseen) if owned.state != GRADIENT]
        self._forget_views()
        if stale:
            self._residency.bring_home(stale)
            self._residency.forget(stale)
        if self._common is not None:
            self._common.suspect(viewed)

    def end(self) -> None:
        """An iteration has ended: complete what can be read unseen."""
        self._forget_views()
        for owned in (*self._views, *self._unseen):
            self._residency.bring_home(owned.groups)
        if self._views or self._unseen:
            self._complete_common()

    def _complete_common(self) -> None:
        """Wait for all updates of what processes have in common: whoever writes to a page unseen copies neighbours."""
        if self._common is not None:
            self._residency.bring_home(weight.group for weight in self._common.weights)

    def _forget_views(self) -> None:
        if self._tensors:
            held = {owned: [alias for alias in made if alias() is not None] for owned, made in self._tensors.items()}
            self._tensors = {owned: made for owned, made in held.items() if made}
        if self._views:
            alive = {owned: [view for view in views if view() is not None] for owned, views in self._views.items()}
            self._views = {owned: views for owned, views in alive.items() if views}

    def _replaced_states(self) -> Iterator[LiveGroup]:
        held = self._updates.optimizer.state if self._updates is not None else {}
        for weight in self._weights:
            states = weight.states
            if states.known and states.group is not None and states.group.buffer is not None:
                state = held.get(weight.param, {})
                if not (states.unchanged(state) or states.present(state)):
                    yield states.group

    def _learn_states(self) -> None:
        assert self._updates is not None
        self._generation = self._updates.generation
        self._of_states, self._kept = {}, []
        for weight in self._weights:
            for place, value in tensors_of(self._updates.state(weight)).items():
                storage = value.untyped_storage()
                self._of_states[address_of(storage)] = TrackedTensor(weight, place)
                self._kept.append(storage)


_ORDINARY = (Tensor, nn.Parameter)


def _sum_memory(gradient: TrackedTensor) -> int | None:
    total = gradient.weight.total
    return None if total is None else address_of(total.host.untyped_storage())


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# -- the modes --------------------------------------------------------------------------------------------------------


class _Operations(OperationMode):
    """Sees every operation of torch, those of ``state_dict``, ``deepcopy`` or ``numpy()`` among them."""

    beside_compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.guard: Guard | None = None
        """The guard; None before it is installed and once it is removed, perhaps by a thread that has another stack."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, guard = kwargs or {}, self.guard
        if guard is None:
            return func(*args, **kwargs)
        touched: dict[TrackedTensor, bool] = {}  # and whether it is written
        gpu: torch.device | None = None  # of a tensor of the user's
        for position, argument in enumerate((*args, *kwargs.values())):
            for tensor in _tensors(argument):
                owned = guard.find(tensor)
                if owned is None and tensor.device.type != "cpu":
                    gpu = tensor.device
                if owned is not None:
                    touched[owned] = touched.get(owned, False) or writes(func, position, len(args), kwargs)
        if not touched:
            return called_with_care(func, *args, **kwargs) if needs_care(func) else func(*args, **kwargs)
        if gpu is not None and func not in _COPIES:
            if any(touched.values()) or not _is_plain_read(gpu, (*args, *kwargs.values())):
                raise limits.OUTSIDE_USE.error(f"{next(iter(touched)).label} is used outside its block, by {func}")
            guard.read(touched)
            return _computed_on(gpu, func, args, kwargs)
        guard.read(owned for owned, written in touched.items() if not written)
        if any(touched.values()):
            guard.write(owned for owned, written in touched.items() if written)
        out = called_with_care(func, *args, **kwargs) if needs_care(func) else func(*args, **kwargs)
        # An operation in place returns the tensor that it was given, which is no new one in this memory.
        if isinstance(out, Tensor) and (owned := guard.find(out)) is not None and not touched.get(owned):
            guard.made(owned, out)
        return out


class _Calls(WatchingMode):
    """Sees the calls that reach a tensor's memory without an operation, and ``autograd.grad`` of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.guard: Guard | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        look, guard = _SEEN.get(func), self.guard
        if look is None or guard is None:
            return func(*args, **(kwargs or {}))
        if func == _DEVICE:
            return _HERE if guard.remote and guard.find(args[0]) is not None else func(*args)
        look(guard, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        # In plain PyTorch weights are on the GPU, and this would copy them: a script that keeps the best ones must not
        # see them trained.
        if guard.remote and _brings(guard, func, args, kwargs or {}) and guard.find(args[0]) is not None:
            return out.copy() if func is Tensor.numpy else out.clone() if guard.find(out) is not None else out
        if func in _VIEWS:
            owned = guard.find(args[0])
            if owned is not None:
                guard.hand_out(owned, out)
        return out


class GuardModes:
    """The modes of a guard, on the stacks of the thread that places them; without a guard they do nothing.

    Torch gives a backward stacks of its own, whose changes are gone with it: what is to be there afterwards has to be
    placed before.
    """

    def __init__(self) -> None:
        self.operations, self.calls = _Operations(), _Calls()
        self.thread = 0
        """The thread that has placed them; 0: none."""

    def place(self) -> None:
        """Place them on the stacks of the calling thread, unless they are in place."""
        if not self.thread:
            self.thread = threading.get_ident()
            self.calls.place()
            DISPATCH_MODES.push(self.operations)

    def watch_for(self, guard: Guard | None) -> None:
        """Watch for ``guard`` from now on."""
        self.operations.guard = self.calls.guard = guard

    def remove(self) -> None:
        """End; operations of other threads were never seen."""
        if self.thread == threading.get_ident():
            DISPATCH_MODES.lift(self.operations)
            self.calls.lift()
        self.thread = 0
        self.watch_for(None)


def _is_plain_read(gpu: torch.device, arguments: Sequence[Any]) -> bool:
    differentiated = any(tensor.requires_grad for argument in arguments for tensor in _tensors(argument))
    return gpu.type == "cuda" and not (differentiated and torch.is_grad_enabled())


def _computed_on(gpu: torch.device, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` as in plain PyTorch, where weights would be on ``gpu`` with the tensors that they meet.

    An average of weights that is kept there, or a reference model, is an example. Page-locked weights are read where
    they are: the budget need not have room for a copy.
    """

    def on_gpu(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(on_gpu, argument))
        if not isinstance(argument, Tensor) or argument.device.type != "cpu" or argument.dim() == 0:
            return argument
        argument = argument.detach()
        if argument.is_contiguous() and argument.is_pinned():
            return zero_copy_view(argument, gpu)
        return argument.to(gpu)

    out = func(*map(on_gpu, args), **{name: on_gpu(value) for name, value in kwargs.items()})
    torch.cuda.current_stream(gpu).synchronize()  # the host copies may change as soon as this returns
    return out


_COPIES = (torch.ops.aten.copy_.default, FOREACH_COPY)


def _read(guard: Guard, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    owned = guard.find(tensor)
    if owned is not None:
        guard.read([owned])


def _assign(guard: Guard, tensor: Tensor, data: Tensor) -> None:
    owned = guard.find(tensor)
    if owned is None:
        return
    if owned.weight.param is tensor:
        guard.replace(owned.weight, data)
    else:
        guard.write([owned])


def _differentiate(guard: Guard, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
    for tensor in _tensors(inputs if isinstance(inputs, Tensor) else list(inputs)):
        owned = guard.find(tensor)
        if owned is not None:
            raise limits.PARTIAL_BACKWARD.error(f"torch.autograd.grad of {owned.label}")


_HERE = torch.device("cpu")
"""The device that weights and states say on a GPU's path. By this very object it is known whether somebody wants a
tensor where the weights are: in plain PyTorch ``p.to(p.device)`` is ``p``, and what is written there counts."""
_DEVICE = Tensor.device.__get__


def _brings(guard: Guard, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call asks for a tensor to be on the host, and not where the weights are."""
    if func is Tensor.to:
        wanted = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, (str, torch.device, Tensor))]
        return any(guard.find(one) is None if isinstance(one, Tensor) else one is not _HERE for one in wanted)
    return func is Tensor.cpu or (func is Tensor.numpy and bool(kwargs.get("force")))


_VIEWS = (Tensor.numpy, Tensor.__array__, Tensor.untyped_storage, Tensor.storage, typed_storage, Tensor.__dlpack__)
"""Calls that return a view of a tensor's memory that is no tensor."""
_PLAIN_READS = (Tensor.tolist, Tensor.data_ptr, Tensor.__reduce_ex__)
_READS = (*_VIEWS, *_PLAIN_READS, Tensor.__repr__, Tensor.__format__)
_SEEN: dict[Any, Callable[..., None]] = {
    **dict.fromkeys(_READS, _read),
    **dict.fromkeys((Tensor.cpu, Tensor.to), lambda *_, **__: None),  # a copy that is made is seen as an operation
    _DEVICE: lambda *_, **__: None,
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    torch.autograd.grad: _differentiate,
}


def _tensors(argument: Any) -> Iterator[Tensor]:
    """Yield the tensors of one argument or result; operations nest them no deeper than in a list."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, Tensor):
                yield item


class Suspended(threading.local):
    """A context without the modes of a guard; does nothing in threads that do not have them.

    Its state is each thread's own. A GPU's backward runs in a thread of autograd, which gets a copy of the stacks of
    the thread that called ``backward``: there the modes are lifted from the copy.
    """

    def __init__(self, modes: GuardModes) -> None:
        self._modes = modes
        self._depth = 0
        self._above: tuple[int | None, int | None] = (None, None)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._above = DISPATCH_MODES.lift(self._modes.operations), self._modes.calls.lift()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            (operations, calls), self._above = self._above, (None, None)
            if calls is not None:
                self._modes.calls.place(calls)
            if operations is not None:
                DISPATCH_MODES.insert(self._modes.operations, operations)


_installed: weakref.WeakSet[Guard] = weakref.WeakSet()


def _leave_child() -> None:
    """A data loader's worker has a copy of the modes, but not of the threads that they would wait for."""
    for guard in list(_installed):
        guard.remove()


os.register_at_fork(after_in_child=_leave_child)
