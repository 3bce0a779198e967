"""Host memory that is used again: activations go where those of the last iteration were. Knows sizes and events."""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from lt_offload.execute.device.base import Cell, Device, Event

_STEP = 4096

ROUNDING = 2 * _STEP
"""Bytes per block by which its activations may take more than their size: whole pages, and aligned storages in them."""


class HostBuffer(Cell):
    """Some host memory; ``used`` is the last task that touched it, to be awaited by the next."""

    __slots__ = ("data", "used")

    def __init__(self, data: Tensor) -> None:
        super().__init__("host activation")
        self.data = data
        self.used: Event | None = None


class HostPool:
    """Host buffers by size."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._free: list[HostBuffer] = []
        self.nbytes = 0
        """Bytes allocated in all."""

    def take(self, nbytes: int) -> HostBuffer:
        """Return the smallest free buffer of at least ``nbytes`` that wastes at most a quarter, else a new one."""
        at = bisect.bisect_left(self._free, nbytes, key=_size)
        if at < len(self._free) and _size(self._free[at]) <= nbytes + nbytes // 4 + _STEP:
            return self._free.pop(at)
        size = -(-nbytes // _STEP) * _STEP
        self.nbytes += size
        return HostBuffer(self.device.host_empty((size,), torch.uint8))

    def give(self, buffer: HostBuffer, used: Event | None) -> None:
        """Take ``buffer`` back; ``used`` is the last task that reads or writes it."""
        buffer.used = used
        bisect.insort(self._free, buffer, key=_size)


def _size(buffer: HostBuffer) -> int:
    return buffer.data.numel()
