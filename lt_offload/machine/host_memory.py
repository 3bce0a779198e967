"""Host memory at its exact size, registered with the GPU driver so that copies run asynchronously.

``torch``'s pinned allocator may round every tensor up to a power of two. Here memory is mapped from the operating
system by pages and registered where it is. A mapping is registered in one piece or not at all, however large it is: the
driver refuses copies that touch two registrations, or one and memory beside it, with "invalid argument". So every copy
of a tensor, or of a group, is valid as it is.

To unregister memory may make the calling thread wait for all the work of the GPU. So memory whose tensors are gone
stays mapped and registered until its owner asks for more, asks how much there is (a device does at the end of an
iteration), or closes: never in a finalizer, which runs in whatever thread drops the last reference, in the middle of
anything.

What the driver refuses to register stays pageable and works too, only slower: ``is_pageable`` says so. Every tensor has
a storage of its own, so that saving it writes its bytes and no others.
"""

from __future__ import annotations

import bisect
import logging
import math
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lt_offload.machine.accounting import Account
from lt_offload.machine.numa import MemoryNode
from lt_offload.machine.pages import Pages, map_pages
from lt_offload.machine.pinning import Register, Unregister, advice
from lt_offload.schema.plan import ALIGNMENT
from lt_offload.units import format_bytes, round_up

_log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20
"""Small tensors share mappings of this size."""

LARGE_BYTES = 8 << 20
"""Tensors of at least this size have a mapping of their own: hardly a page is wasted, and it goes when they go."""


HOST_MEMORY = "host memory (setting host_memory)"
"""Its name in errors."""


@dataclass(slots=True, eq=False)
class _Slab:
    pages: Pages
    used: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mapping:
    memory: object
    """Keeps the addresses from being given to others."""
    nbytes: int
    locked: bool
    users: weakref.ref[memoryview]
    """What all tensors in it hold: they are no more when it is no more."""
    process: int = field(default_factory=os.getpid)
    """The process that has registered it."""


class HostMemory:
    """Hands out host tensors. They live as long as somebody uses them, after ``close`` as ordinary memory.

    One thread at a time may ask for memory; tensors may die, and ``is_pageable`` be asked, on any. ``register``
    page-locks ``(address, bytes)`` and returns 0 or an error code, ``unregister`` undoes that; without them nothing has
    to be page-locked.
    """

    def __init__(
        self,
        register: Register | None = None,
        unregister: Unregister = lambda address: 0,
        *,
        node: MemoryNode | None = None,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._node = node or MemoryNode()
        self._shared: list[_Slab] = []
        self._mapped: dict[int, _Mapping] = {}
        """By address."""
        self._locked = 0
        self._pageable: tuple[tuple[int, int], ...] = ()
        """Begin and end of each mapping that could not be registered, in order."""
        self._limit = sys.maxsize
        """The driver has refused to register as much as this in all."""
        self._error = 0
        self._told = -1
        """Pageable bytes at the last message to the user; -1: there was none."""
        self._account = Account(what=HOST_MEMORY)
        # Whoever drops this object without closing it must not leave registrations to which nobody has the address.
        weakref.finalize(self, _unregister_all, self._mapped, unregister)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were handed out and are in use."""
        return self._account.current

    def limit(self, nbytes: int) -> None:
        """Raise ``OverBudget`` for tensors beyond ``nbytes`` in all."""
        self._account.limit = nbytes

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes of the memory that was taken; what nobody uses any more is given back first."""
        self._give_back()
        return self._locked

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        pages, start = self._take(nbytes)
        return self._tensor(pages, start, shape, dtype)

    def group(self, members: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the bytes of uninitialised (shape, dtype) side by side, each at an ``ALIGNMENT``, and the tensors."""
        starts = [0]
        for shape, dtype in members:
            starts.append(round_up(starts[-1] + math.prod(shape) * dtype.itemsize, ALIGNMENT))
        if starts[-1] == 0:
            return torch.empty(0, dtype=torch.uint8), [torch.empty(tuple(s), dtype=d) for s, d in members]
        pages, base = self._take(starts[-1])
        tensors = [
            self._tensor(pages, base + start, shape, dtype)
            for (shape, dtype), start in zip(members, starts, strict=False)
        ]
        return pages.view(torch.uint8, starts[-1], base), tensors

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, or the very tensor where nothing has to be page-locked."""
        if self._register is None:
            self._account.charge(tensor)
            return tensor
        copy = self.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy

    def take_in(self, pages: Pages) -> None:
        """Page-lock ``pages``, which somebody else has mapped and which ``nbytes`` does not count, if possible."""
        if self._register is not None:
            self._give_back()
            self._register_pages(pages, touch=False)

    def locked(self, nbytes: int) -> torch.Tensor | None:
        """Return page-locked bytes that ``nbytes`` does not count, None if the driver refuses.

        Ask early for bytes that you cannot do without: later on, others may have reached a limit.
        """
        self._give_back()
        pages = map_pages(nbytes)
        return pages.view(torch.uint8, nbytes, 0) if self._track(pages) else None

    @property
    def has_pageable(self) -> bool:
        """True if some memory could not be page-locked."""
        return bool(self._pageable)

    def is_pageable(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in memory from here that is not page-locked; memory from elsewhere does not.

        The first answer of either kind is logged, so that the user knows how copies run.
        """
        spans, address = self._pageable, tensor.data_ptr()
        index = bisect.bisect_right(spans, (address, sys.maxsize)) - 1
        pageable = index >= 0 and spans[index][0] <= address < spans[index][1]
        if self._told < pageable:
            self._tell()
        return pageable

    def close(self) -> None:
        """Unregister everything and forget it; idempotent."""
        self._shared.clear()
        _unregister_all(self._mapped, self._unregister)
        self._locked, self._pageable = 0, ()

    def _tensor(self, pages: Pages, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        tensor = pages.view(dtype, count, start).view(tuple(shape))
        self._account.charge(tensor)
        return tensor

    def _take(self, nbytes: int) -> tuple[Pages, int]:
        """Return pages with ``nbytes`` that nobody uses, and where they begin."""
        if nbytes >= LARGE_BYTES:
            return self._map(nbytes), 0
        slab = next((slab for slab in self._shared if slab.used + nbytes <= SLAB_BYTES), None)
        if slab is None:
            slab = _Slab(self._map(SLAB_BYTES))
            self._shared.append(slab)
        start = slab.used
        slab.used = round_up(start + nbytes, ALIGNMENT)
        return slab.pages, start

    def _map(self, nbytes: int) -> Pages:
        self._give_back()  # before more is taken
        pages = map_pages(nbytes)
        self._register_pages(pages)
        return pages

    def _register_pages(self, pages: Pages, *, touch: bool = True) -> None:
        if not self._track(pages, touch=touch):
            span = (pages.address, pages.address + pages.nbytes)
            self._pageable = tuple(sorted((*self._pageable, span)))

    def _track(self, pages: Pages, *, touch: bool = True) -> bool:
        """Register ``pages`` and keep account of them; return whether they are page-locked."""
        address = pages.address
        if touch and (self._node.cores or torch.get_num_threads() > 1):
            self._node.run(pages.touch)  # or registering would take the pages on this core alone
        locked = self._lock(address, pages.nbytes)
        # Tensors hold the pages' own view of the mapping, and the account holds the mapping.
        users = weakref.ref(pages.memory)
        self._mapped[address] = _Mapping(memory=pages.memory.obj, nbytes=pages.nbytes, locked=locked, users=users)
        return locked

    def _lock(self, address: int, nbytes: int) -> bool:
        # Not asked again for as much as was refused once.
        if self._locked + nbytes >= self._limit:
            return False
        code = 0 if self._register is None else self._register(address, nbytes)
        if code != 0:
            self._limit, self._error = self._locked + nbytes, code
            return False
        self._locked += nbytes
        return True

    def _give_back(self) -> None:
        """Unregister the mappings that nobody uses any more and give them back to the operating system."""
        gone = False
        for address in [address for address, mapping in self._mapped.items() if mapping.users() is None]:
            mapping = self._mapped.pop(address)
            if mapping.locked:
                self._locked -= mapping.nbytes
            _unlock(mapping, address, self._unregister)
            gone = gone or not mapping.locked
        if gone:
            self._pageable = tuple(span for span in self._pageable if span[0] in self._mapped)

    def _tell(self) -> None:
        pageable = self._told = sum(end - start for start, end in self._pageable)
        if pageable == 0:
            sizes = format_bytes(self._locked), format_bytes(self.nbytes)
            _log.info("copies use page-locked host memory: %s, with tensors of %s", *sizes)
            return
        _log.warning(
            "only %s of %s of host memory could be page-locked (error %d): the rest is copied through page-locked "
            "buffers, which is slower. To lock more: %s",
            format_bytes(self._locked),
            format_bytes(self._locked + pageable),
            self._error,
            advice(),
        )


def _unregister_all(mapped: dict[int, _Mapping], unregister: Unregister) -> None:
    """Unregister everything: tensors that are in use live on as ordinary memory."""
    while mapped:
        address, mapping = mapped.popitem()
        _unlock(mapping, address, unregister)


def _unlock(mapping: _Mapping, address: int, unregister: Unregister) -> None:
    if mapping.locked and os.getpid() == mapping.process:  # a forked child shares the pages, not the registration
        code = unregister(address)
        if code != 0:
            _log.warning("cudaHostUnregister failed with error %d", code)
