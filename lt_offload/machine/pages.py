"""Memory mapped from the operating system by whole pages, for the engine's host memory and for measurements of links.

Mappings are shared: a private one would be copied at the next write after a fork (data loader workers), while the GPU
would go on using the old pages; keeping it from the children would take the weights away from them. Huge pages are not
asked for: most systems give them to private memory only, and updates on the host gain little by them.

Memory begins at a page whose number differs from mapping to mapping, modulo ``_PERIOD``: untouched pages surround it.
Tensors of one size that are updated together (weight, gradient, moments) would otherwise lie at distances of a power of
two, which some processors' caches punish: on one, a fused AdamW step over four tensors of 128 MiB took three times as
long.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from lt_offload.units import round_up

_STRIDE, _PERIOD = 17, 64
"""Mapping k begins at a page whose number is ``k * _STRIDE`` modulo ``_PERIOD``."""
_serial = itertools.count()
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Zeroed memory from the operating system, which takes it back when no tensor uses it."""

    memory: memoryview
    """The mapping, as all tensors in it hold it: when this is gone, they are."""
    start: int
    """Where it begins in ``memory``; the pages before and behind it are never touched."""
    nbytes: int

    @property
    def address(self) -> int:
        """Where this process sees it."""
        return self.view(torch.uint8, 1, 0).data_ptr()

    def view(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """Return ``count`` elements from byte ``offset`` on, as a tensor with a storage of its own."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.start + offset)

    def bytes(self) -> torch.Tensor:
        """Return all of it."""
        return self.view(torch.uint8, self.nbytes, 0)

    def touch(self) -> None:
        """Have the operating system give the memory now, on all threads that torch uses."""
        self.bytes().zero_()


def map_pages(nbytes: int) -> Pages:
    """Return at least ``nbytes`` of memory, by whole pages."""
    count = round_up(nbytes, mmap.PAGESIZE) // mmap.PAGESIZE
    memory = mmap.mmap(-1, (_PERIOD + count) * mmap.PAGESIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    first = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() // mmap.PAGESIZE
    lead = (next(_serial) * _STRIDE - first) % _PERIOD
    return Pages(memory=memoryview(memory), start=lead * mmap.PAGESIZE, nbytes=count * mmap.PAGESIZE)


def forget(tensor: torch.Tensor) -> None:
    """Take the pages of ``tensor`` out of memory if they are those of a file; whoever reads it again reads the file.

    Other memory stays as it is, and so does what shares a page with another tensor.
    """
    first = round_up(tensor.data_ptr(), mmap.PAGESIZE)
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.is_contiguous() and first < last and _in_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def _in_file(first: int, last: int) -> bool:
    """Return whether the addresses are in one mapping of a file."""
    for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
        addresses, _, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= first and last <= end:
            return inode != "0"
    return False
