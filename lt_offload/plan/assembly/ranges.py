"""The arena while an iteration is scheduled: which ranges are taken, until when, and where the next buffer goes.

Time is counted in two ways. Steps say who may lie where: two buffers may share addresses if their stays have no step in
common. Seconds say when: what is on its way out is gone for the order of issue, but whoever takes its range waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Key = tuple[int, int]
"""Names a stay: its number and the step of its first use."""
Policy = Literal["oldest", "next", "lowest"]
"""Where a buffer goes of all places that are free: where nothing has to be awaited and the gap is the tightest; right
behind the last one, round and round; or as low as possible where nothing has to be awaited."""


@dataclass(slots=True)
class _Taken:
    low: int
    high: int
    last: int
    """The last step of the stay."""
    key: Key


_Leaving = tuple[int, int, float]
"""A range, and when its last use, or the copy to the host, has ended."""


@dataclass(slots=True)
class Reserved:
    """A range that a stay will take."""

    key: Key
    low: int
    high: int
    wanted: int
    """The step in which it would like to come."""
    needed: int
    """The step in which it has to."""
    last: int


class ArenaRanges:
    """The moving part of an arena of ``size`` bytes."""

    def __init__(self, size: int, policy: Policy) -> None:
        self.size, self.policy = size, policy
        self.taken: list[_Taken] = []
        """In ascending order."""
        self._leaving: list[_Leaving] = []
        self._reserved: dict[Key, Reserved] = {}
        self._cursor = 0

    def reserve(self, reserved: Reserved) -> None:
        """Keep a range free for a stay that comes; a later reservation for the same stay replaces the earlier one."""
        self._reserved[reserved.key] = reserved

    def advance(self, step: int, now: float) -> None:
        """Forget the stays that ended before ``step``, and those that were gone by ``now``."""
        self.taken = [taken for taken in self.taken if taken.last >= step]
        self._leaving = [leaving for leaving in self._leaving if leaving[2] > now]
        if any(item.last < step for item in self._reserved.values()):
            self._reserved = {key: item for key, item in self._reserved.items() if item.last >= step}

    def find(self, key: Key, size: int, step: int, last: int) -> tuple[int, float] | None:
        """Return where a buffer that stays from ``step`` to ``last`` goes, and when that is free; None if nowhere."""
        own = self._reserved.get(key)
        if own is not None:
            taken = [(taken.low, taken.high) for taken in self.taken]
            taken += [(item.low, item.high) for item in self._reserved.values() if step <= item.needed < own.needed]
            if any(low < own.high and own.low < high for low, high in taken):
                return None
            return own.low, self._free_at(own.low, own.high)
        hard, soft = [], []
        for item in self._reserved.values():
            if item.needed <= last:
                hard.append((item.low, item.high))
            elif item.wanted <= last:
                soft.append((item.low, item.high))
        best: tuple[tuple[float, ...], int, float] | None = None
        for low, high in self._gaps(hard):
            if high - low < size:
                continue
            leaving = [item for item in self._leaving if item[0] < high and low < item[1]]
            wanted = [item for item in soft if item[0] < high and low < item[1]]
            for place in sorted(self._places(low, high - size, size, leaving, wanted)):
                end = place + size
                free_at = max([until for begin, over, until in leaving if begin < end and place < over], default=0.0)
                in_the_way = sum(
                    [min(over, end) - max(begin, place) for begin, over in wanted if begin < end and place < over]
                )
                rank = self._rank(place, size, low, high, free_at, in_the_way)
                if best is None or rank < best[0]:
                    best = rank, place, free_at
                    if rank[:2] == (0, 0) and self.policy != "oldest":
                        return place, free_at  # none is better: places are looked at in ascending order
        return None if best is None else (best[1], best[2])

    def take(self, key: Key, low: int, size: int, last: int) -> None:
        """Put a buffer at ``low`` that stays until the end of step ``last``."""
        high = low + size
        at = next((index for index, taken in enumerate(self.taken) if taken.low > low), len(self.taken))
        self.taken.insert(at, _Taken(low, high, last, key))
        self._reserved.pop(key, None)
        self._cursor = high
        kept = []
        for leaving in self._leaving:
            begin, end, until = leaving
            if begin >= high or end <= low:
                kept.append(leaving)
                continue
            if begin < low:
                kept.append((begin, low, until))
            if high < end:
                kept.append((high, end, until))
        self._leaving = kept

    def leave(self, low: int, size: int, until: float) -> None:
        """Note that the buffer at ``low`` is used, or copied to the host, until then."""
        self._leaving.append((low, low + size, until))

    def _gaps(self, hard: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        blocked = [(taken.low, taken.high) for taken in self.taken]
        if hard:
            blocked = sorted(blocked + hard)
        at = 0
        for low, high in blocked:
            if low > at:
                yield at, low
            at = max(at, high)
        if self.size > at:
            yield at, self.size

    def _places(
        self, low: int, high: int, size: int, leaving: list[_Leaving], wanted: list[tuple[int, int]]
    ) -> set[int]:
        """Return places from ``low`` to ``high`` that touch something."""
        found = {low, high}
        if low < self._cursor < high:
            found.add(self._cursor)
        for begin, end in (*[item[:2] for item in leaving], *wanted):
            if low < end < high:
                found.add(end)
            if low < begin - size < high:
                found.add(begin - size)
        return found

    def _free_at(self, low: int, high: int) -> float:
        return max([until for begin, end, until in self._leaving if begin < high and low < end], default=0.0)

    def _rank(self, place: int, size: int, low: int, high: int, free_at: float, in_the_way: int) -> tuple[float, ...]:
        if self.policy == "oldest":
            return in_the_way, free_at, high - low, min(place - low, high - place - size), place
        if self.policy == "next":
            return in_the_way, (place - self._cursor) % self.size
        return in_the_way, free_at, place
