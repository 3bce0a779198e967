"""Copies of parcels between host and device: as few as there are ranges without a gap on both sides. Knows no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.groups import Parcel
from lt_offload.execute.tensors import distinct

Pair = tuple[Tensor, Tensor]
"""A range of host memory and one of the arena, of as many bytes."""


class Transfer:
    """Parcels that are copied by one task, again and again; remembers the ranges that were copied last.

    Args:
        device: what copies.
        parcels: all of them, whether or not there is something to copy.
        label: of the tasks.
        op: the plan's op that the tasks belong to, if any.
    """

    def __init__(self, device: Device, parcels: Sequence[Parcel], *, label: str, op: int = -1) -> None:
        self.parcels = tuple(parcels)
        self._device, self._label, self._op = device, label, op
        self._copied: tuple[tuple[Parcel, int], ...] = ()
        self._pairs: list[Pair] = []
        self._nbytes = 0

    def fetch(self) -> Event | None:
        """Queue the copies that fill the attached parcels; return their event, None if there is nothing to copy."""
        items = [item for item in self.parcels if item.buffer is not None and item.filled]
        if not items:
            return None
        event = self._device.submit(
            "h2d",
            _copies(self._device.copy, self._find(items), to_device=True),
            after=distinct(item.current for item in items),
            reads=[item.host_cell for item in items],
            writes=[item.buffer for item in items if item.buffer is not None],
            label=self._label,
            op=self._op,
            nbytes=self._nbytes,
        )
        for item in items:
            item.ready = event
        return event

    def write_back(self) -> Event | None:
        """Queue the copies of newer device copies to the host; return their event, None if there are none."""
        items = [item for item in self.parcels if item.dirty]
        if not items:
            return None
        event = self._device.submit(
            "d2h",
            _copies(self._device.copy, self._find(items), to_device=False),
            after=[self._device.mark(), *distinct(item.current for item in items)],
            reads=[item.buffer for item in items if item.buffer is not None],
            writes=[item.host_cell for item in items],
            label=self._label,
            op=self._op,
            nbytes=self._nbytes,
        )
        for item in items:
            item.current = item.leaving = event
            item.dirty = False
        return event

    def forget_views(self) -> None:
        """Let go of the arena."""
        self._copied, self._pairs = (), []

    def _find(self, items: Sequence[Parcel]) -> list[Pair]:
        """Return what to copy: as a plan's offsets are fixed, mostly what was copied the last time."""
        wanted = tuple((item, item.buffer.offset) for item in items if item.buffer is not None)
        if wanted != self._copied:
            self._copied, self._pairs = wanted, coalesced(items)
            self._nbytes = sum(host.numel() for host, _ in self._pairs)
        return self._pairs


def coalesced(parcels: Sequence[Parcel]) -> list[Pair]:
    """Return the ranges of attached ``parcels``, where what lies side by side on both sides is one."""
    found: list[tuple[Parcel, Parcel]] = []
    for parcel in sorted(parcels, key=_offset):
        if found and _follows(found[-1][1], parcel):
            found[-1] = (found[-1][0], parcel)
        else:
            found.append((parcel, parcel))
    return [_range(first, last) for first, last in found]


def _offset(parcel: Parcel) -> int:
    assert parcel.buffer is not None
    return parcel.buffer.offset


def _follows(one: Parcel, other: Parcel) -> bool:
    """Return whether ``other`` begins where ``one`` ends, in the arena and in the same mapping of host memory."""
    if one.span is not other.span or _offset(other) != _offset(one) + one.room:
        return False
    return other.host.data_ptr() == one.host.data_ptr() + one.room


def _range(first: Parcel, last: Parcel) -> Pair:
    """Return the bytes from the beginning of ``first`` to the end of ``last``."""
    assert first.buffer is not None
    nbytes = _offset(last) - _offset(first) + last.nbytes
    with torch.inference_mode(False):
        host = first.host.as_strided((nbytes,), (1,), first.host.storage_offset())
        arena = first.buffer.slab[_offset(first) : _offset(first) + nbytes]
    return host, arena


def _copies(copy: Callable[[Tensor, Tensor], None], pairs: Sequence[Pair], *, to_device: bool) -> Callable[[], None]:
    def run() -> None:
        for host, arena in pairs:
            copy(arena, host) if to_device else copy(host, arena)

    return run
