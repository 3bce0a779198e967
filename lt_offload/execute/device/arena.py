"""Ranges of the arena: which are in use, and which events the next user of a free one has to come after.

A range is free as soon as the op that frees it has been issued, not when it has run: nobody waits for memory. What is
left is order, which the next writer of the range takes over as ``releases``.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lt_offload.errors import OverBudget
from lt_offload.execute.device.base import Buffer, Event
from lt_offload.schema.plan import ALIGNMENT
from lt_offload.units import format_bytes, round_up


@dataclass(slots=True, eq=False)
class Freed:
    """A free range that was used before; never changed."""

    start: int
    end: int
    releases: tuple[Event, ...]


class Arena:
    """Range bookkeeping over one slab of uint8 memory."""

    def __init__(self, slab: torch.Tensor) -> None:
        self.slab = slab
        self._starts: list[int] = []
        self._used: dict[int, Buffer] = {}
        self._freed: list[Freed] = []
        """Disjoint, ascending."""
        self._tidy_at = 16
        """Length of ``_freed`` at which ranges that need no ordering any more are looked for."""

    @property
    def extent(self) -> int:
        """Bytes of the slab."""
        return self.slab.numel()

    @property
    def used(self) -> int:
        """Bytes in use."""
        return sum(buffer.nbytes for buffer in self._used.values())

    def place(self, offset: int, nbytes: int, label: str) -> Buffer:
        """Take a range, with its former users as ``releases``; raises ``OverBudget`` if it is not free, or outside."""
        assert offset % ALIGNMENT == 0, f"offset {offset} of {label} is not a multiple of {ALIGNMENT}"
        end = offset + nbytes
        if end > self.extent:
            raise OverBudget(f"{label} at [{offset}, {end}) does not fit into the arena of {self.extent} bytes")
        other = self._overlapping(offset, end)
        if other is not None:
            raise OverBudget(
                f"{label} at [{offset}, {end}) overlaps {other.label} at "
                f"[{other.offset}, {other.offset + other.nbytes}), which is in use"
            )
        taken = self._cut(offset, end)
        # Without these, the next writer would overwrite what copies of the former users still read.
        releases = list(dict.fromkeys(event for freed in taken for event in freed.releases))
        buffer = Buffer(label, offset, nbytes, self.slab, releases)
        if nbytes:
            bisect.insort(self._starts, offset)
            self._used[offset] = buffer
        return buffer

    def find(self, nbytes: int, label: str) -> int:
        """Return the lowest offset at which ``nbytes`` are free; raises ``OverBudget``."""
        offset = largest = 0
        for start in [*self._starts, self.extent]:
            if offset + nbytes <= start:
                return offset
            largest = max(largest, start - offset)
            if start < self.extent:
                offset = round_up(start + self._used[start].nbytes, ALIGNMENT)
        raise OverBudget(
            f"{label} needs {format_bytes(nbytes)} ({nbytes} bytes) of the arena, but {format_bytes(self.used)} of "
            f"{format_bytes(self.extent)} ({self.extent} bytes) are in use; the largest free range has {largest} bytes"
        )

    def free(self, buffer: Buffer, releases: Iterable[Event]) -> None:
        """Give a range back; its next user is ordered after ``releases``."""
        if buffer.nbytes:
            assert self._used.get(buffer.offset) is buffer, f"{buffer.label} is not in use"
            del self._used[buffer.offset]
            del self._starts[bisect.bisect_left(self._starts, buffer.offset)]
            freed = Freed(buffer.offset, buffer.offset + buffer.nbytes, tuple(releases))
            if freed.releases:
                bisect.insort(self._freed, freed, key=_start)
        buffer.forget()
        if len(self._freed) > self._tidy_at:
            self._freed = [freed for freed in self._freed if not all(event.done() for event in freed.releases)]
            self._tidy_at = 16 + 2 * len(self._freed)  # without this every write would look through a longer list

    def _overlapping(self, start: int, end: int) -> Buffer | None:
        if start == end:
            return None
        after = bisect.bisect_left(self._starts, end)
        if after == 0:
            return None
        last = self._used[self._starts[after - 1]]
        return last if last.offset + last.nbytes > start else None

    def _cut(self, start: int, end: int) -> list[Freed]:
        """Cut ``[start, end)`` out of the freed ranges, which stay disjoint, and return those that it touched."""
        if not self._freed or start == end:
            return []
        low = max(0, bisect.bisect_right(self._freed, start, key=_start) - 1)
        high = bisect.bisect_left(self._freed, end, key=_start)
        touched: list[Freed] = []
        rest: list[Freed] = []
        for freed in self._freed[low:high]:
            if freed.end <= start:
                rest.append(freed)
                continue
            touched.append(freed)
            if freed.start < start:
                rest.append(Freed(freed.start, start, freed.releases))
            if freed.end > end:
                rest.append(Freed(end, freed.end, freed.releases))
        self._freed[low:high] = rest
        return touched


def _start(freed: Freed) -> int:
    return freed.start
