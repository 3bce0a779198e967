"""Saved tensors of a block between its forward and its backward: kept on the device, or moved to the host and back.

A weight is never kept alive by a saved tensor: its alias is replaced by a :class:`WeightAlias`, which finds the weight
again wherever it is when the backward needs it. Other tensors are moved by storage, so that views of one storage travel
once and come back exactly as they were. Host memory comes from a :class:`HostPool`, which hands out the buffers of the
last iteration again.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import call
from typing import Any

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.compat.torch import DisableTorchDispatch, address_of, dispatch_modes, skip_in_dynamo
from lt_offload.errors import UnsupportedError
from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.memory.tensors import Weight
from lt_offload.model.saving import SparseParts, travels
from lt_offload.model.snapshot import version
from lt_offload.units import round_up

_no_modes = DisableTorchDispatch
"""Context in which views are made: no mode has to see them."""

_PAGE = 4096

ROUNDING = 2 * _PAGE
"""Bytes that the host copies of one block's activations may take beyond their size: whole pages, storages aligned."""


Form = tuple[torch.Size, torch.dtype]
"""Shape and dtype as which a storage is copied."""


class HostBuffer(Cell):
    """Host memory for the activations of one block; whoever uses it next waits for ``used``, the last task on it."""

    __slots__ = ("_layout", "_places", "data", "used")

    def __init__(self, data: Tensor) -> None:
        super().__init__("host activation")
        self.data = data
        self.used: Event | None = None
        self._layout: tuple[Form, ...] = ()
        self._places: list[Tensor] = []

    def places(self, layout: Sequence[Form]) -> list[Tensor]:
        """Return one tensor per element of ``layout``, side by side; mostly it is the layout of the last time."""
        wanted = tuple(layout)
        if wanted != self._layout:
            at = 0
            self._layout, self._places = wanted, []
            for shape, dtype in wanted:
                nbytes = shape.numel() * dtype.itemsize
                self._places.append(self.data[at : at + nbytes].view(dtype).view(shape))
                at += round_up(nbytes, _HOST_ALIGNMENT)
        return self._places


class HostPool:
    """Free host buffers, ascending by size; a buffer is taken for one forward and given back after its backward."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._free: list[tuple[int, int, HostBuffer]] = []
        """With their sizes, and numbers that tell those of one size apart."""
        self._given = 0
        self._taken: dict[HostBuffer, weakref.ref[Any]] = {}
        """The others, and who has each. Not all give theirs back: nothing is left of a forward whose loss is dropped,
        and a finalizer that did it would lose a Ctrl-C that comes while it runs: Python ignores what one raises."""
        self.nbytes = 0
        """Bytes allocated in all."""

    def take(self, nbytes: int, user: Any) -> HostBuffer:
        """Return the smallest free buffer of at least ``nbytes`` that wastes at most a quarter, else a new one.

        It is ``user``'s until that gives it back or is no more.
        """
        buffer = self._smallest(nbytes)
        if buffer is None:
            for taken in [taken for taken, by in self._taken.items() if by() is None]:
                self.give(taken)
            buffer = self._smallest(nbytes)
        if buffer is None:
            size = round_up(nbytes, _PAGE)
            self.nbytes += size
            buffer = HostBuffer(self.device.host_empty((size,), torch.uint8))
        self._taken[buffer] = weakref.ref(user)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take ``buffer`` back."""
        del self._taken[buffer]
        self._given += 1
        insort(self._free, (buffer.data.numel(), self._given, buffer))

    def _smallest(self, nbytes: int) -> HostBuffer | None:
        index = bisect_left(self._free, (nbytes,))
        fits = index < len(self._free) and self._free[index][0] <= nbytes + nbytes // 4 + _PAGE
        return self._free.pop(index)[-1] if fits else None


_HOST_ALIGNMENT = 64
"""Saved storages begin at multiples of this many bytes in host memory: a cache line."""


@dataclass(slots=True)
class WeightAlias:
    """A saved tensor that is a view of a weight."""

    weight: Weight
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self) -> Tensor:
        """Return the same view of the weight's present copy, which may be at another address than in the forward.

        Raises ``UnsupportedError`` outside the backward of a block that owns it.
        """
        view = self.weight.present
        if view is None:
            raise limits.INNER_TENSOR.error(f"the loss uses a tensor from inside the block of {self.weight.label}")
        with _no_modes():
            return view.as_strided(self.shape, self.stride, view.storage_offset() + self.offset)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Moved:
    """A saved tensor whose storage travels."""

    storage: MovedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self) -> Tensor:
        """Return the tensor for a node of the graph, which writes to none: others may be given the same."""
        memory = self.storage.use()
        if memory.shape == self.shape and memory.stride() == self.stride and memory.dtype == self.dtype:
            return memory
        return self._on(memory)

    def restore(self) -> Tensor:
        """Return the tensor as it was, on the fetched storage."""
        return self._on(self.storage.use())

    def _on(self, memory: Tensor) -> Tensor:
        with _no_modes():  # nothing is allocated here, and a mode would take longer than all of it
            tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
            return tensor.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class MovedStorage:
    """One storage that saved tensors share: on the device, on its way, or on the host."""

    __slots__ = ("__weakref__", "_label", "_owner", "device", "form", "nbytes", "taken", "users", "watched")

    def __init__(self, owner: ActivationOffloader, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        # Weakly, as it has this one in turn: with its last user goes all that was saved for a forward.
        self._owner, self._label = weakref.ref(owner), owner.label
        self.nbytes = storage.nbytes()
        whole = tensor.is_contiguous() and tensor.nbytes == self.nbytes
        self.device: Tensor | None = _bare(tensor) if whole else _bytes_of(tensor.device, storage)
        """All of it on the device; None while only the host has it."""
        self.form: Form = self.device.shape, self.device.dtype
        self.taken: list[weakref.ref[Moved]] = []
        """Saved tensors that share it."""
        self.users = 0
        """Number of these that have not been unpacked yet."""
        self.watched: tuple[Tensor, int] | None = None
        """A tensor that nobody may write to before it has been copied, and its version when it was saved."""

    def check_untouched(self) -> None:
        """Raise if the watched tensor was written to, perhaps before it was copied."""
        # Autograd compares versions of saved tensors only where no hooks are set, so that the check is ours to make.
        assert self.watched is not None
        tensor, known = self.watched
        if version(tensor) != known:
            raise UnsupportedError(
                f"an input or a result of block {self._label} was written to after it was saved, so that the "
                "block cannot run again; write out of place"
            )

    def use(self) -> Tensor:
        """Return all of it on the device for one saved tensor; after the last one nothing here holds it any more."""
        memory, owner = self.device, self._owner()
        if owner is None:
            raise limits.INNER_TENSOR.error(f"the loss uses a tensor from inside block {self._label}")
        if memory is None or not owner.awaited:
            if memory is not None and owner.at_home:  # autograd.grad inside the forward: nothing has left yet
                return memory
            memory = owner.arrived(self)
        assert self.users > 0
        self.users -= 1
        if self.users == 0:
            self.device = None
        return memory


class ActivationOffloader:
    """Moves the saved storages of one block to the host after its forward and back before its backward."""

    def __init__(self, device: Device, pool: HostPool, label: str) -> None:
        self.device = device
        self.pool = pool
        self.label = label
        self.everything = False
        """Masks and indices travel, too, and each storage comes back when it is used: before there is a plan nobody has
        counted what several parts of a batch would have on the device together."""
        self._op: int | None = None
        """The backward that storages come back for, where each does so by itself."""
        self._by_storage: dict[int, weakref.ref[MovedStorage]] = {}
        """Storages by address, in the forward. One saved for a part of the graph that nothing needs goes with that."""
        self._storages: list[MovedStorage] = []
        """The same after it."""
        self._host: HostBuffer | None = None
        """Host memory of all storages, side by side."""
        self._places: list[Tensor] = []
        """The host memory of each storage."""
        self.nbytes = 0
        """Bytes that have left."""
        self._left: Event | None = None
        """The copies to the host."""
        self._fetched: Event | None = None
        """The copies back."""
        self.awaited = False
        """The compute lane is ordered after the copies back."""
        self._memory = Cell(f"activations {label}")
        """The device memory of all storages, for the happens-before checker."""
        self._leaving: tuple[Cell, list[Tensor]] | None = None
        """The device memory that is being copied to the host, until it is released: a plan may fetch before that."""

    @property
    def at_home(self) -> bool:
        """True if nothing has left yet."""
        return self._left is None and self._fetched is None

    def keep(self, leaf: Any) -> Any:
        """Take a result that a second run needs, if it travels; return what gives it back to :func:`given_back`."""
        return self.take(leaf, watch=True) if isinstance(leaf, Tensor) and travels(leaf) else leaf

    def take(self, tensor: Tensor, *, watch: bool = False) -> Moved:
        """Register ``tensor``; its storage will travel. ``watch``: raise if it is written to before it has left."""
        memory = tensor.untyped_storage()
        known = self._by_storage.get(address_of(memory))
        storage = None if known is None else known()
        if storage is None:
            storage = MovedStorage(self, tensor, memory)
            self._by_storage[address_of(memory)] = weakref.ref(storage)
        if watch and storage.watched is None:
            storage.watched = (tensor, version(tensor))
        moved = Moved(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        storage.taken.append(weakref.ref(moved))
        return moved

    def leave(self, op: int) -> Event | None:
        """Queue the copies to the host; return their event, None if there is nothing to move."""
        # The forward is over. Once storages die, others may get their addresses and would be taken for them.
        self._storages = [storage for known in self._by_storage.values() if (storage := known()) is not None]
        self._by_storage.clear()
        for storage in self._storages:
            # What has gone with a part of the graph that nothing needs will never be unpacked, so it is not waited for.
            storage.users = len(storage.taken) - [*map(call, storage.taken)].count(None)
        if not self._storages:
            return None
        sources: list[Tensor] = []
        for storage in self._storages:
            assert storage.device is not None
            if storage.watched is not None:
                storage.check_untouched()
            sources.append(storage.device)
        self._take_host_memory()
        assert self._host is not None
        places, used = self._places, self._host.used
        self._leaving = self._memory, sources
        # After the mark, as kernels of the forward may still be writing the sources; after ``used``, as the last
        # iteration's copies back may still be reading this host memory.
        self._left = self.device.submit(
            "d2h",
            partial(self.device.copy_all, places, sources),
            after=[self.device.mark(writes=[self._memory]), *([] if used is None else [used])],
            reads=[self._memory],
            writes=[self._host],
            label=f"offload activation {self.label}",
            op=op,
            nbytes=self.nbytes,
        )
        self._host.used = self._left
        return self._left

    def released(self) -> None:
        """Let go of the device storages once they have been copied."""
        assert self._left is not None and self._leaving is not None
        # torch's allocator knows nothing of the copy lane: without this wait the compute lane could be given the memory
        # of a storage, and write there, while it is still being copied.
        self.device.wait(self._left, writes=[self._leaving[0]])
        self._leaving = None
        for storage in self._storages:
            if storage.watched is not None:
                storage.check_untouched()
                storage.watched = None
        if self._fetched is None:
            for storage in self._storages:
                storage.device = None

    def fetch(self, op: int) -> None:
        """Take device memory and queue the copies back."""
        if self._fetched is not None or not self._storages:
            return
        if self.everything:
            self._op = op
        else:
            self._bring(op, self._storages, self._places, self.nbytes)

    def _bring(self, op: int, storages: Sequence[MovedStorage], places: list[Tensor], nbytes: int) -> None:
        assert self._left is not None and self._host is not None
        self._memory = Cell(f"fetched activations {self.label}")
        targets = self.device.empty_all([storage.form for storage in storages])
        for storage, target in zip(storages, targets, strict=True):
            storage.device = target
        # After a new mark: the memory of ``empty`` may still be in use by kernels that were launched before.
        self._fetched = self.device.submit(
            "h2d",
            partial(self.device.copy_all, targets, places),
            after=[self._left, self.device.mark(writes=[self._memory])],
            reads=[self._host],
            writes=[self._memory],
            label=f"prefetch activation {self.label}",
            op=op,
            nbytes=nbytes,
        )
        self._host.used = self._fetched

    def arrived(self, storage: MovedStorage) -> Tensor:
        """Order the compute lane after the copies back, of all storages or of this one; refuses other backwards."""
        if self._op is not None and storage.device is None:
            at = next(at for at, other in enumerate(self._storages) if other is storage)
            self._bring(self._op, [storage], [self._places[at]], storage.nbytes)
            self.awaited = False
        if not self.awaited:
            if self._fetched is None:
                raise limits.INNER_TENSOR.error(f"the loss uses a tensor from inside block {self.label}")
            self.device.wait(self._fetched, reads=[self._memory])
            self.awaited = True
        assert storage.device is not None
        return storage.device

    def close(self) -> None:
        """Give the host memory back; whoever takes it next writes after the last copy from or to it."""
        for storage in self._storages:
            storage.device = None
        if self._host is not None:
            # Not waited for here: the next one to take the buffer does, if it has to.
            self.pool.give(self._host)
            self._host = None
        self._places = []
        self._storages.clear()

    def _take_host_memory(self) -> None:
        sizes = [storage.nbytes for storage in self._storages]
        self.nbytes = sum(sizes)
        self._host = self.pool.take(sum([-(-nbytes // _HOST_ALIGNMENT) for nbytes in sizes]) * _HOST_ALIGNMENT, self)
        with _no_modes():
            self._places = self._host.places([storage.form for storage in self._storages])


def given_back(kept: Any) -> Any:
    """Return the result that :meth:`ActivationOffloader.keep` was given."""
    return kept.restore() if isinstance(kept, Moved) else kept


def _bare(tensor: Tensor) -> Tensor:
    if not dispatch_modes():  # mostly; to leave modes takes longer than all of it
        return tensor.data
    with _no_modes():
        return tensor.data


def _bytes_of(device: torch.device, storage: torch.UntypedStorage) -> Tensor:
    with _no_modes():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Hooks for a block's private graph: weights become aliases, other tensors stay or travel.

    A saved tensor becomes what returns it when it is called: the node calls that, and of a tensor that stays no Python.
    Without an ``offloader`` all stays; ``staying`` are tensors that stay on the device in any case.
    """

    def __init__(
        self, weights: Sequence[Weight], offloader: ActivationOffloader | None, staying: Sequence[Tensor]
    ) -> None:
        present = sorted([(w.present.data_ptr(), w.index, w) for w in weights if w.present is not None])
        starts = [start for start, _, _ in present]
        stay = {address_of(t.untyped_storage()) for t in staying} if offloader is not None else ()
        moves = _has_elements if offloader is not None and offloader.everything else travels

        # Weakly: a function that knows itself is a cycle, and holds what a forward has saved when its loss is gone.
        hooks: Any = weakref.ref(self)

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            if tensor.layout is not torch.strided:
                return partial(SparseParts(tensor, hooks().pack_hook).unpack, call)
            # By address, not by identity: what a linear layer saves is weight.t(), a new tensor every time.
            address = tensor.data_ptr()
            index = bisect_right(starts, address) - 1
            if index >= 0:
                start, _, weight = present[index]
                if address < start + weight.nbytes:
                    assert weight.present is not None and tensor.dtype == weight.present.dtype
                    offset = (address - start) // tensor.itemsize
                    return WeightAlias(weight, offset, tensor.shape, tensor.stride())
            if offloader is None or address_of(tensor.untyped_storage()) in stay or not moves(tensor):
                # Without a graph, as a saved output would hold the node that holds it: a cycle that no collector sees.
                return repeat(_bare(tensor)).__next__
            return offloader.take(tensor)

        # Where a compiled block's graph breaks, operations run uncompiled, and torch would compile the hooks they call.
        skip_in_dynamo(pack)
        super().__init__(pack, call)


def _has_elements(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.itemsize
