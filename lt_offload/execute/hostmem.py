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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lt_offload.plan.schedule import ALIGNMENT
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20
"""Small tensors share mappings of this size."""

LARGE_BYTES = 8 << 20
"""Tensors of at least this size have a mapping of their own, so that hardly a page is wasted."""


@dataclass(slots=True, eq=False)
class _Slab:
    memory: mmap.mmap
    address: int
    registered: bool
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
        self._slabs: list[_Slab] = []
        self.nbytes = 0
        """Bytes handed out."""

    @property
    def registered_bytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(len(slab.memory) for slab in self._slabs if slab.registered)

    @property
    def mapped_bytes(self) -> int:
        """Bytes taken from the operating system."""
        return sum(len(slab.memory) for slab in self._slabs)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        slab = self._slab_for(nbytes)
        start = slab.used
        slab.used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        self.nbytes += nbytes
        return torch.frombuffer(slab.memory, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``."""
        copy = self.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy

    def close(self) -> None:
        """Unregister everything and forget it; idempotent."""
        slabs, self._slabs = self._slabs, []
        self.nbytes = 0
        for slab in slabs:
            if slab.registered:
                code = self._unregister(slab.address)
                if code != 0:
                    _log.warning("cudaHostUnregister failed with error %d", code)

    def _slab_for(self, nbytes: int) -> _Slab:
        if nbytes >= LARGE_BYTES:
            return self._new_slab(nbytes)
        fitting = (slab for slab in self._slabs if slab.used + nbytes <= len(slab.memory))
        return next(fitting, None) or self._new_slab(SLAB_BYTES)

    def _new_slab(self, nbytes: int) -> _Slab:
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
        slab = _Slab(memory, address, registered=code == 0)
        self._slabs.append(slab)
        return slab
