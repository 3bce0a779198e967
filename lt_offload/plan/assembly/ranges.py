"""The arena while an iteration is scheduled: its taken ranges, their ends, and the place of the next buffer.

Time is counted in two ways. Steps say who may lie where: two buffers may share addresses if their stays have no step in
common. Seconds say when: what is on its way out is gone for the order of issue, but whoever takes its range waits.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Literal, NamedTuple

Key = tuple[int, int]
"""Names a stay: its number and the step of its first use."""
Policy = Literal["oldest", "next", "lowest"]
"""The choice of a free place: in the tightest gap without a wait; right behind the last buffer, round and round; or the
lowest without a wait."""


class _Taken(NamedTuple):
    low: int
    high: int
    last: int
    """The last step of the stay."""
    key: Key


_Leaving = tuple[int, int, float]
"""A range, and the time at which its last use, or the copy to the host, has ended."""


@dataclass(slots=True)
class Reserved:
    """A range that a stay will take."""

    key: Key
    low: int
    high: int
    wanted: int
    """The step in which it comes if there is room."""
    needed: int
    """The step in which it has to be there."""
    last: int


_Range = tuple[int, int]
_Place = tuple[tuple[float, ...], int, float]
"""Rank of a place, the least first; its beginning, and the time from which it is free."""


class ArenaRanges:
    """The moving part of an arena of ``size`` bytes.

    Planning spends much of its time here: a plan takes some ten thousand searches for a place.
    """

    def __init__(self, size: int, policy: Policy) -> None:
        self.size, self.policy = size, policy
        self.taken: list[_Taken] = []
        """In ascending order."""
        self._leaving: list[_Leaving] = []
        self._reserved: dict[Key, Reserved] = {}
        self._closed: dict[int, tuple[list[_Taken], list[_Range]]] = {}
        """By the last step of a stay: the reserved ranges that it cannot have, and ranges that it should not have."""
        self._cursor = 0

    def reserve(self, reserved: Reserved) -> None:
        """Keep a range free for a stay that comes; a later reservation for the same stay replaces the earlier one."""
        self._reserved[reserved.key] = reserved
        self._closed.clear()

    def advance(self, step: int, now: float) -> None:
        """Forget the stays that ended before ``step``, and those that were gone by ``now``."""
        self.taken = [taken for taken in self.taken if taken[2] >= step]
        self._leaving = [leaving for leaving in self._leaving if leaving[2] > now]
        over = [key for key, item in self._reserved.items() if item.last < step]
        for key in over:
            del self._reserved[key]
        if over:
            self._closed.clear()

    def find(self, key: Key, size: int, step: int, last: int) -> tuple[int, float] | None:
        """Return the place of a buffer that stays from ``step`` to ``last``, and when it is free; None without any."""
        own = self._reserved.get(key)
        if own is not None:
            return self._own(own, step)
        hard, soft = self._closed_to(last)
        blocked = sorted([*self.taken, *hard]) if hard else self.taken
        best: _Place | None = None
        at = 0
        for low, high, _, _ in (*blocked, _Taken(self.size, self.size, 0, key)):
            if low > at and low - at >= size:
                best = self._within(at, low, size, soft, best)
                if best is not None and best[0][:2] == (0, 0) and self.policy != "oldest":
                    break  # none is better: gaps are looked at in ascending order
            if high > at:
                at = high
        return None if best is None else (best[1], best[2])

    def _own(self, own: Reserved, step: int) -> tuple[int, float] | None:
        """Return the reserved place of a stay, if it is free from ``step`` on."""
        for taken in self.taken:
            if taken[0] < own.high and own.low < taken[1]:
                return None
        # Taken now, it would be in the way of a stay that needs an overlapping range before this one.
        for item in self._reserved.values():
            if step <= item.needed < own.needed and item.low < own.high and own.low < item.high:
                return None
        return own.low, max([out[2] for out in self._leaving if out[0] < own.high and own.low < out[1]], default=0.0)

    def _closed_to(self, last: int) -> tuple[list[_Taken], list[_Range]]:
        closed = self._closed.get(last)
        if closed is None:
            items = self._reserved.values()
            # A stay needed before the buffer leaves would have no place; one that only may come by then can wait.
            closed = self._closed[last] = (
                sorted(_Taken(item.low, item.high, item.last, item.key) for item in items if item.needed <= last),
                [(item.low, item.high) for item in items if item.wanted <= last < item.needed],
            )
        return closed

    def _within(self, low: int, high: int, size: int, soft: list[_Range], best: _Place | None) -> _Place | None:
        """Return the best place of the gap from ``low`` to ``high``, or ``best``, of another gap, if that is better."""
        oldest = self.policy == "oldest"
        if oldest and best is not None and best[0] < (0, 0.0, high - low):
            return best
        leaving = [item for item in self._leaving if item[0] < high and low < item[1]]
        wanted = [item for item in soft if item[0] < high and low < item[1]] if soft else soft
        if leaving or wanted:
            places = self._places(low, high - size, size, leaving, wanted)
        elif self.policy == "next" and low < self._cursor <= high - size:
            places = {self._cursor}
        else:
            places = {low}  # all are alike, and the lowest is the first
        for place in places:
            end, free_at, in_the_way = place + size, 0.0, 0
            for begin, over, until in leaving:
                if begin < end and place < over and until > free_at:
                    free_at = until
            for begin, over in wanted:
                if begin < end and place < over:
                    in_the_way += min(over, end) - max(begin, place)
            rank: tuple[float, ...]
            if oldest:
                rank = in_the_way, free_at, high - low, min(place - low, high - end), place
            elif self.policy == "next":
                rank = in_the_way, (place - self._cursor) % self.size
            else:
                rank = in_the_way, free_at, place
            if best is None or rank < best[0]:
                best = rank, place, free_at
        return best

    def take(self, key: Key, low: int, size: int, last: int) -> None:
        """Put a buffer at ``low`` that stays until the end of step ``last``."""
        high = low + size
        insort(self.taken, _Taken(low, high, last, key))
        if self._reserved.pop(key, None) is not None:
            self._closed.clear()
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

    def _places(self, low: int, high: int, size: int, leaving: list[_Leaving], wanted: list[_Range]) -> set[int]:
        places = {low, high}
        if low < self._cursor < high:
            places.add(self._cursor)
        for begin, end in (*((begin, end) for begin, end, _ in leaving), *wanted):
            if low < end < high:
                places.add(end)
            if low < begin - size < high:
                places.add(begin - size)
        return places
