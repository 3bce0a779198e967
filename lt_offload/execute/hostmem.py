"""Host memory at its exact size, registered with the GPU driver so that copies run asynchronously. Knows no lanes.

``torch``'s pinned allocator may round every tensor up to a power of two. Here memory is mapped from the operating
system by pages and registered where it is; what the driver refuses to register stays pageable and works too, only
slower. A tensor never spans two registrations, as a copy must lie in one. Every tensor has a storage of its own, so
that saving it writes its bytes and no others.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lt_offload.plan.schedule import ALIGNMENT
from lt_offload.profile.accounting import Account
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20
"""Small tensors share mappings of this size."""

LARGE_BYTES = 8 << 20
"""Tensors of at least this size have a mapping of their own: hardly a page is wasted, and it goes when they go."""


@dataclass(slots=True, eq=False)
class _Slab:
    memory: mmap.mmap
    size: int
    used: int = 0


class HostMemory:
    """Hands out host tensors. They live as long as somebody uses them, after ``close`` as ordinary memory.

    Args:
        register: page-locks ``(address, bytes)`` and returns 0, or an error code.
        unregister: undoes that for an address and returns 0, or an error code.
    """

    def __init__(self, register: Callable[[int, int], int], unregister: Callable[[int], int]) -> None:
        self._register = register
        self._unregister = unregister
        self._shared: list[_Slab] = []
        self._mapped: dict[weakref.finalize[..., mmap.mmap], int] = {}
        """What undoes each mapping's registration (nothing, if it is pageable), and its size."""
        self._account = Account()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were handed out and are in use."""
        return self._account.current

    @property
    def mapped_bytes(self) -> int:
        """Bytes taken from the operating system."""
        return sum(size for release, size in self._mapped.items() if release.alive)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        memory, start = self._take(nbytes)
        tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(tuple(shape))
        self._account.charge(tensor)
        return tensor

    def group(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the bytes of uninitialised tensors of the given (shape, dtype) side by side, and the tensors.

        Each begins at a multiple of ``ALIGNMENT`` and has a storage of its own.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
        if starts[-1] == 0:
            return torch.empty(0, dtype=torch.uint8), [torch.empty(tuple(s), dtype=d) for s, d in parts]
        memory, base = self._take(starts[-1])
        tensors = []
        for (shape, dtype), start in zip(parts, starts, strict=False):
            count = math.prod(shape)
            if count == 0:
                tensors.append(torch.empty(tuple(shape), dtype=dtype))
                continue
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=base + start).view(tuple(shape))
            self._account.charge(tensor)
            tensors.append(tensor)
        return torch.frombuffer(memory, dtype=torch.uint8, count=starts[-1], offset=base), tensors

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``."""
        copy = self.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy

    def close(self) -> None:
        """Unregister everything and forget it; idempotent."""
        self._shared.clear()
        for release in list(self._mapped):
            release()
        self._mapped.clear()

    def _take(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a mapping with ``nbytes`` that nobody uses, and where they begin."""
        if nbytes >= LARGE_BYTES:
            return self._map(nbytes), 0
        slab = self._shared_slab(nbytes)
        start = slab.used
        slab.used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return slab.memory, start

    def _shared_slab(self, nbytes: int) -> _Slab:
        for slab in self._shared:
            if slab.used + nbytes <= slab.size:
                return slab
        self._shared.append(_Slab(self._map(SLAB_BYTES), SLAB_BYTES))
        return self._shared[-1]

    def _map(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # A shared mapping: a private one would be copied at the next write after a fork (data loader workers), while
        # the GPU would go on using the old pages.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        code = self._register(address, size)
        if code != 0:
            _log.warning(
                "%s of host memory could not be page-locked (error %d): copies from and to it are slower. Containers "
                "limit locked memory; see `ulimit -l`",
                format_bytes(size),
                code,
            )
        # The mapping lives as long as a tensor in it; it must be unregistered just before it goes.
        release = weakref.finalize(memory, _unregister if code == 0 else _nothing, self._unregister, address)
        self._mapped = {known: bytes_ for known, bytes_ in self._mapped.items() if known.alive} | {release: size}
        return memory


def _unregister(unregister: Callable[[int], int], address: int) -> None:
    code = unregister(address)
    if code != 0:
        _log.warning("cudaHostUnregister failed with error %d", code)


def _nothing(unregister: Callable[[int], int], address: int) -> None:
    pass
