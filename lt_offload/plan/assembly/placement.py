"""Offsets in the arena for buffers with cyclic lifetimes: first fit, or packing that may shorten lifetimes.

Each buffer lives during a range of steps that may run across the end of the iteration. Two buffers that live in a
common step must not overlap. The smallest extent is NP-hard to find; first fit (``place``) comes within 10 to 20 % of
the peak of live bytes, which no placement can beat. Where the arena is nearly full in every step that is too much.
Most buffers, though, need not be there as early as planned, nor as long: ``pack`` takes for each the first lifetime
that fits and repairs what did not fit (it takes some neighbours out and puts all back in another order), which brings
the waste to almost nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.iteration.memory import aligned
from lt_offload.schema.plan import ALIGNMENT

_UNITS = (4096, 16384)
"""Resolution of the arena, from and to: one bit per unit and step says whether it is taken."""
_REMOVED = (4, 24)
"""How many buffers a repair takes out."""
_STAGNATION = 0.4
"""Part of the repairs after which, if none of them has helped, no more are tried."""
_POLISH = 0.1
"""The same where everything has a place already."""
_NEARLY = 5
"""How many times as many are tried where only one or two have no place."""
_TARGETED = 0.3
"""Part of the repairs that make room at one place instead of taking out at random."""
_REACH = (0, 1, 2, 4)
"""How many steps away from the one that did not fit they may live."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer that lives from the beginning of step ``start`` to the end of step ``end``, cyclically."""

    bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every buffer goes."""

    offsets: tuple[int, ...]
    extent: int
    live_peak: int
    """Most bytes that live in one step: a lower bound for the extent."""

    @property
    def waste(self) -> float:
        """By how much the extent is larger than the peak of live bytes, as part of that."""
        return self.extent / self.live_peak - 1 if self.live_peak else 0.0


def live_bytes(lifetimes: Sequence[Lifetime], steps: int) -> NDArray[np.int64]:
    """Return, per step, the arena bytes of the buffers that live in it."""
    sizes = np.array([aligned(life.bytes) for life in lifetimes], dtype=np.int64)
    total: NDArray[np.int64] = sizes @ _live(lifetimes, steps)
    return total


def place(lifetimes: Sequence[Lifetime], steps: int) -> Placement:
    """Return offsets such that buffers which live in a common step do not overlap.

    Buffers that live always go to the bottom; the others are placed one by one at the lowest free range, in the best of
    several orders.
    """
    if not lifetimes:
        return Placement((), 0, 0)
    sizes = np.array([aligned(life.bytes) for life in lifetimes], dtype=np.int64)
    live = _live(lifetimes, steps)
    live_peak = int((sizes @ live).max())
    forever = live.all(axis=1)
    base = int(sizes[forever].sum())
    offsets = np.zeros(len(sizes), dtype=np.int64)
    offsets[forever] = np.cumsum(sizes[forever]) - sizes[forever]
    moving = np.flatnonzero(~forever)
    extent = 0
    if len(moving):
        dense = live[moving].astype(np.float32)
        conflicts = (dense @ dense.T) > 0
        attempts = [_first_fit(sizes[moving], conflicts, order) for order in _orders(sizes[moving], live[moving])]
        best, extent = min(attempts, key=lambda item: item[1])
        offsets[moving] = best + base
    return Placement(tuple(offsets.tolist()), base + extent, live_peak)


def _live(lifetimes: Sequence[Lifetime], steps: int) -> NDArray[np.bool_]:
    """Return, per buffer and step, whether the buffer lives in it."""
    start = np.array([life.start for life in lifetimes], dtype=np.int64).reshape(-1, 1)
    end = np.array([life.end for life in lifetimes], dtype=np.int64).reshape(-1, 1)
    step = np.arange(steps)
    wraps = start > end
    inside: NDArray[np.bool_] = np.where(wraps, (start <= step) | (step <= end), (start <= step) & (step <= end))
    return inside


def _orders(sizes: NDArray[np.int64], live: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Return orders worth trying: large first, long-lived first; ties by time, so that equal sizes share slots."""
    first, span = live.argmax(axis=1), live.sum(axis=1)
    return [
        np.lexsort((first, -sizes)),
        np.lexsort((first, -span, -sizes)),
        np.lexsort((first, -sizes, -span)),
    ]


def _first_fit(
    sizes: NDArray[np.int64], conflicts: NDArray[np.bool_], order: NDArray[np.intp]
) -> tuple[NDArray[np.int64], int]:
    """Place the buffers in ``order``, each at the lowest range that no conflicting buffer placed before overlaps."""
    offsets, ends = np.zeros((2, len(sizes)), dtype=np.int64)
    # Those that have been placed, sorted by offset, so that the scan for a gap needs no sorting of its own.
    placed = np.empty(len(sizes), dtype=np.intp)
    lows = np.empty(len(sizes), dtype=np.int64)
    for count, item in enumerate(order):
        row = placed[:count]
        row = row[conflicts[item, row]]
        free_from = np.zeros(len(row) + 1, dtype=np.int64)
        np.maximum.accumulate(ends[row], out=free_from[1:])
        fits = np.flatnonzero(offsets[row] - free_from[:-1] >= sizes[item])
        low = int(free_from[fits[0]] if len(fits) else free_from[-1])
        offsets[item], ends[item] = low, low + sizes[item]
        slot = int(np.searchsorted(lows[:count], low))
        placed[slot + 1 : count + 1] = placed[slot:count].copy()
        lows[slot + 1 : count + 1] = lows[slot:count].copy()
        placed[slot], lows[slot] = item, low
    return offsets, int(ends.max())


# -- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flexible:
    """A buffer with the lifetimes it may have, the best first, each as its steps."""

    bytes: int
    lifetimes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """Where every buffer goes and which lifetime it has."""

    offsets: tuple[int, ...]
    lifetimes: tuple[int, ...]
    """Index of the chosen lifetime."""
    missing: int
    """Bytes that found no place in the worst step; 0: all is well."""


def pack(buffers: Sequence[Flexible], steps: int, capacity: int, *, rounds: int) -> Packed:
    """Return offsets below ``capacity`` such that buffers which live in a common step do not overlap.

    ``rounds`` is how many repairs are tried; the result does not depend on how fast they are.
    """
    search = _PackSearch(buffers, steps, capacity)
    search.run(rounds)
    return search.packed()


def _unit(sizes: Sequence[int], capacity: int) -> int:
    """Return the multiple of ``ALIGNMENT`` for which rounding up wastes the least; equal blocks give equal sizes."""
    count = Counter(sizes)
    fine, coarse = (max(capacity // units // ALIGNMENT, 1) for units in reversed(_UNITS))
    # Those that divide one of the sizes.
    units = {fine} | {
        -(-size // parts // ALIGNMENT)
        for size in count
        for parts in range(size // (coarse * ALIGNMENT) + 1, size // (fine * ALIGNMENT) + 1)
    }

    def wasted(unit: int) -> int:
        return sum(-size % unit * many for size, many in count.items())

    return min((unit * ALIGNMENT for unit in sorted(units, reverse=True) if fine <= unit <= coarse), key=wasted)


def _patience(homeless: int) -> float:
    """Return the part of the repairs that may fail in a row."""
    return _POLISH if not homeless else _STAGNATION * (_NEARLY if homeless <= 2 else 1)


class _PackSearch:
    def __init__(self, buffers: Sequence[Flexible], steps: int, capacity: int) -> None:
        self.buffers, self.steps = buffers, steps
        self.unit = _unit([buffer.bytes for buffer in buffers], capacity)
        self.everything = (1 << max(capacity // self.unit, 0)) - 1
        self.units = [-(-buffer.bytes // self.unit) for buffer in buffers]
        self.always = [frozenset.intersection(*map(frozenset, buffer.lifetimes)) for buffer in buffers]
        """The steps that all lifetimes of a buffer have in common."""
        self.taken = [0] * steps
        """Per step, the units that are taken, one bit each."""
        self.low: list[int | None] = [None] * len(buffers)
        """Per buffer, the first of its units."""
        self.chosen = [0] * len(buffers)
        """Per buffer, the index of its lifetime."""
        self.homeless = set(range(len(buffers)))
        self.shortened: set[int] = set()
        # In units times steps: what has no place, and what was shortened.
        self.missing = sum(map(self._area, self.homeless))
        self.lost = 0
        self.living: list[list[int]] = [[] for _ in range(steps)]
        for index, buffer in enumerate(buffers):
            for step in buffer.lifetimes[0]:
                self.living[step].append(index)
        for index in sorted(range(len(buffers)), key=lambda i: (-self.units[i], buffers[i].lifetimes[0][0])):
            self._put(index)

    def run(self, rounds: int) -> None:
        """Repair until everything has a place, then until what was shortened has as much time as it may."""
        generator = random.Random(0)
        improved = 0
        for count in range(_NEARLY * rounds):
            trouble = sorted(self.homeless or self.shortened)
            if not trouble or count - improved > rounds * _patience(len(self.homeless)):
                return
            cost = self.missing, self.lost
            first = generator.choice(trouble)
            removed = (self._in_the_way if generator.random() < _TARGETED else self._neighbours)(first, generator)
            before = [(i, low, self.chosen[i]) for i in removed if (low := self.low[i]) is not None]
            for index in removed:
                self._take_out(index)
            power = generator.choice((0.0, 0.5, 1.0))
            urgency = {i: self.units[i] * len(self.buffers[i].lifetimes[0]) ** power for i in removed}
            for index in sorted(removed, key=lambda i: -urgency[i] * generator.uniform(0.5, 1.5)):
                self._put(index)
            if (self.missing, self.lost) > cost:
                for index in removed:
                    self._take_out(index)
                for index, low, lifetime in before:
                    self._occupy(index, low, lifetime)
            elif (self.missing, self.lost) < cost:
                improved = count

    def packed(self) -> Packed:
        """Return the result."""
        missing = [0] * self.steps
        for index in self.homeless:
            for step in self.buffers[index].lifetimes[-1]:
                missing[step] += self.buffers[index].bytes
        return Packed(self._compact(), tuple(self.chosen), max(missing, default=0))

    def _compact(self) -> tuple[int, ...]:
        """Return offsets in bytes, each as low as those below it allow: units are coarser than buffers."""
        top, offsets = [0] * self.steps, [0] * len(self.low)
        for _, index in sorted((low, index) for index, low in enumerate(self.low) if low is not None):
            buffer = self.buffers[index]
            lifetime = buffer.lifetimes[self.chosen[index]]
            offsets[index] = max(top[step] for step in lifetime)
            for step in lifetime:
                top[step] = offsets[index] + aligned(buffer.bytes)
        return tuple(offsets)

    def _neighbours(self, index: int, generator: random.Random) -> list[int]:
        """Return ``index`` and some that live beside it."""
        centre, reach = generator.choice(self.buffers[index].lifetimes[0]), generator.choice(_REACH)
        near = {i for step in range(centre - reach, centre + reach + 1) for i in self.living[step % self.steps]}
        candidates = sorted(near - {index})
        return [index, *generator.sample(candidates, min(len(candidates), generator.randint(*_REMOVED)))]

    def _in_the_way(self, index: int, generator: random.Random) -> list[int]:
        """Return ``index`` and all that would have to go if it were at some place on top of another one, or at 0."""
        lifetime = generator.choice(self.buffers[index].lifetimes)
        beside = {i for step in lifetime for i in self.living[step]} - {index}
        placed = [(bottom, i) for i in sorted(beside) if (bottom := self.low[i]) is not None]
        low = generator.choice([0, *(bottom + self.units[i] for bottom, i in placed)])
        high = low + self.units[index]
        return [index, *(i for bottom, i in placed if bottom < high and low < bottom + self.units[i])]

    def _area(self, index: int) -> int:
        return self.units[index] * len(self.buffers[index].lifetimes[-1])

    def _loss(self, index: int) -> int:
        lifetimes = self.buffers[index].lifetimes
        return self.units[index] * (len(lifetimes[0]) - len(lifetimes[self.chosen[index]]))

    def _put(self, index: int) -> None:
        """Place a buffer at the lowest range that is free during the first of its lifetimes that has one."""
        units = self.units[index]
        for chosen, lifetime in enumerate(self.buffers[index].lifetimes):
            starts = self._starts(units, lifetime)
            if starts:
                self._occupy(index, (starts & -starts).bit_length() - 1, chosen)
                return
            if not chosen and not self._starts(units, self.always[index]):
                return  # in none of the others, then: there may be a hundred of them

    def _starts(self, units: int, lifetime: Iterable[int]) -> int:
        """Return a number whose bit ``i`` says whether ``units`` units from the ``i``-th on are free in all steps."""
        used = 0
        for step in lifetime:
            used |= self.taken[step]
        # Doubling: from a start there are 2n free units if n are free from it and n from n units later.
        starts, length = self.everything & ~used, 1
        while length < units and starts:
            shift = min(length, units - length)
            starts &= starts >> shift
            length += shift
        return starts

    def _occupy(self, index: int, low: int, lifetime: int) -> None:
        mask = ((1 << self.units[index]) - 1) << low
        for step in self.buffers[index].lifetimes[lifetime]:
            self.taken[step] |= mask
        self.low[index], self.chosen[index] = low, lifetime
        self.homeless.discard(index)
        self.missing -= self._area(index)
        if lifetime:
            self.shortened.add(index)
            self.lost += self._loss(index)

    def _take_out(self, index: int) -> None:
        low = self.low[index]
        if low is None:
            return
        mask = ~(((1 << self.units[index]) - 1) << low)
        for step in self.buffers[index].lifetimes[self.chosen[index]]:
            self.taken[step] &= mask
        if self.chosen[index]:
            self.shortened.discard(index)
            self.lost -= self._loss(index)
        self.low[index], self.chosen[index] = None, 0
        self.homeless.add(index)
        self.missing += self._area(index)
