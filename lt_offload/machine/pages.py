"""Memory mapped from the operating system by whole pages, for the engine's host memory and for measurements of links.

Mappings are shared: a private one would be copied at the next write after a fork (data loader workers), while the GPU
would go on using the old pages; keeping it from the children would take the weights away from them. Huge pages are not
asked for: most systems give them to private memory only, and updates on the host gain little by them.

Memory begins at a page whose number differs from mapping to mapping, modulo ``_PERIOD``: untouched pages surround it.
Tensors of one size that are updated together (weight, gradient, moments) would otherwise lie at distances of a power of
two, which some processors' caches punish: on one, a fused AdamW step over four tensors of 128 MiB took three times as
long.

Several processes of one machine may map a file without a name, in RAM (:class:`SharedPages`). It is no file of
/dev/shm, which containers often limit to 64 MB: only the memory limit of the container counts. Having no name, it is
gone when the last process that maps it ends, however it ends. Each process maps it twice. What is written through the
*common* mapping is seen by all. The *own* mapping shows the same memory, and a page that is written through it is
copied first (``MAP_PRIVATE``): the write stays in this process, which sees nothing of that page from others any more,
until :func:`drop_own` forgets the copy.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
    """Offset of its first byte in ``memory``; the pages before and behind it are never touched."""
    nbytes: int

    @property
    def address(self) -> int:
        """Its address in this process."""
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


def resident_bytes(sizes: Mapping[int, int]) -> int:
    """Return the RAM that memory of these sizes, by address, takes; pages of files count once they have been read."""
    import psutil  # type: ignore[import-untyped]

    files = []
    for each in psutil.Process().memory_maps(grouped=False):
        if each.path.startswith("/"):
            start, end = (int(address, 16) for address in each.addr.split("-"))
            files.append((start, end, each.rss))
    files.sort()
    mapped: Counter[tuple[int, int, int]] = Counter()
    total = 0
    for address, nbytes in sizes.items():
        at = bisect.bisect(files, address, key=lambda file: file[0]) - 1
        if at >= 0 and address < files[at][1]:
            mapped[files[at]] += nbytes
        else:
            total += nbytes
    return total + sum(min(nbytes, resident) for (_, _, resident), nbytes in mapped.items())


def _in_file(first: int, last: int) -> bool:
    for line in _MAPS.read_text(encoding="utf-8").splitlines() if _MAPS.exists() else ():
        addresses, _, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= first and last <= end:
            return inode != "0"
    return False


# -- memory that several processes map ---------------------------------------------------------------------------------


def make_file(nbytes: int, name: str) -> int:
    """Return the descriptor of new memory of at least one page, zeroed; pages are taken when they are written.

    ``/proc/PID/smaps`` shows it as ``/memfd:lt_offload NAME``.
    """
    descriptor = os.memfd_create(f"lt_offload {name}", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(mmap.PAGESIZE, round_up(nbytes, mmap.PAGESIZE)))
    return descriptor


def spread(sizes: list[int]) -> tuple[list[int], int]:
    """Return where in a file each of ``sizes`` begins, at pages as mappings have them, and the file's size."""
    starts, end = list[int](), 0
    for number, size in enumerate(sizes):
        first = end // mmap.PAGESIZE
        starts.append((first + (number * _STRIDE - first) % _PERIOD) * mmap.PAGESIZE)
        end = starts[-1] + round_up(size, mmap.PAGESIZE)
    return starts, end


@dataclass(frozen=True, kw_only=True)
class SharedPages:
    """A part of such a file in this process."""

    fd: int
    """Descriptor of the file, to be closed by its opener when all parts are mapped (:meth:`map`)."""
    start: int
    """Offset of the part in the file, at a page."""
    nbytes: int

    def map(self) -> None:
        """Map the part twice; the descriptor may be closed afterwards."""
        _ = self.common, self.own

    @cached_property
    def common(self) -> Pages:
        """The mapping whose writes all see."""
        return self._map(mmap.MAP_SHARED)

    @cached_property
    def own(self) -> Pages:
        """The mapping whose writes stay here."""
        return self._map(mmap.MAP_PRIVATE)

    def _map(self, flags: int) -> Pages:
        length = max(mmap.PAGESIZE, round_up(self.nbytes, mmap.PAGESIZE))
        mapped = mmap.mmap(self.fd, length, flags=flags, offset=self.start)
        return Pages(memory=memoryview(mapped), start=0, nbytes=length)


def drop_own(tensor: torch.Tensor) -> None:
    """Forget what this process has written to the pages of ``tensor``, in an own mapping; neighbours are included."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = round_up(tensor.data_ptr() + tensor.nbytes, mmap.PAGESIZE) - first
    failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
    assert not failed, "memory that is mapped can be given up"
