"""Places buffers into an arena of given size, shortening lifetimes where that helps. Knows sizes and steps only.

Where a large arena is nearly full in every step, placing buffers of given lifetimes wastes 10 to 20 % of it. Most
buffers, though, need not be there as early as planned, nor as long. First fit with the first lifetime that fits, and
a repair of what did not fit (take some neighbours out, put all back in another order) bring the waste to almost
nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        self.at: list[int | None] = [None] * len(buffers)
        self.chosen = [0] * len(buffers)
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
            before = [(index, at, self.chosen[index]) for index in removed if (at := self.at[index]) is not None]
            for index in removed:
                self._take_out(index)
            power = generator.choice((0.0, 0.5, 1.0))
            urgency = {i: self.units[i] * len(self.buffers[i].lifetimes[0]) ** power for i in removed}
            for index in sorted(removed, key=lambda i: -urgency[i] * generator.uniform(0.5, 1.5)):
                self._put(index)
            if (self.missing, self.lost) > cost:
                for index in removed:
                    self._take_out(index)
                for index, at, decision in before:
                    self._occupy(index, at, decision)
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
        top, offsets = [0] * self.steps, [0] * len(self.at)
        for _, index in sorted((at, index) for index, at in enumerate(self.at) if at is not None):
            buffer = self.buffers[index]
            lifetime = buffer.lifetimes[self.chosen[index]]
            offsets[index] = max(top[step] for step in lifetime)
            for step in lifetime:
                top[step] = offsets[index] + -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
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
        placed = [(at, i) for i in sorted(beside) if (at := self.at[i]) is not None]
        low = generator.choice([0, *(at + self.units[i] for at, i in placed)])
        high = low + self.units[index]
        return [index, *(i for at, i in placed if at < high and low < at + self.units[i])]

    def _area(self, index: int) -> int:
        return self.units[index] * len(self.buffers[index].lifetimes[-1])

    def _loss(self, index: int) -> int:
        lifetimes = self.buffers[index].lifetimes
        return self.units[index] * (len(lifetimes[0]) - len(lifetimes[self.chosen[index]]))

    def _put(self, index: int) -> None:
        """Place a buffer at the lowest range that is free during the first of its lifetimes that has one."""
        units = self.units[index]
        for decision, lifetime in enumerate(self.buffers[index].lifetimes):
            starts = self._starts(units, lifetime)
            if starts:
                self._occupy(index, (starts & -starts).bit_length() - 1, decision)
                return
            if not decision and not self._starts(units, self.always[index]):
                return  # in none of the others, then: there may be a hundred of them

    def _starts(self, units: int, lifetime: Iterable[int]) -> int:
        """Return a number whose bit ``i`` says whether ``units`` units from the ``i``-th on are free in all steps."""
        used = 0
        for step in lifetime:
            used |= self.taken[step]
        starts, length = self.everything & ~used, 1
        while length < units and starts:
            shift = min(length, units - length)
            starts &= starts >> shift
            length += shift
        return starts

    def _occupy(self, index: int, at: int, decision: int) -> None:
        mask = ((1 << self.units[index]) - 1) << at
        for step in self.buffers[index].lifetimes[decision]:
            self.taken[step] |= mask
        self.at[index], self.chosen[index] = at, decision
        self.homeless.discard(index)
        self.missing -= self._area(index)
        if decision:
            self.shortened.add(index)
            self.lost += self._loss(index)

    def _take_out(self, index: int) -> None:
        at = self.at[index]
        if at is None:
            return
        mask = ~(((1 << self.units[index]) - 1) << at)
        for step in self.buffers[index].lifetimes[self.chosen[index]]:
            self.taken[step] &= mask
        if self.chosen[index]:
            self.shortened.discard(index)
            self.lost -= self._loss(index)
        self.at[index], self.chosen[index] = None, 0
        self.homeless.add(index)
        self.missing += self._area(index)
