"""Places buffers into an arena of given size, shortening lifetimes where that helps. Knows sizes and steps only.

Where a large arena is nearly full in every step, placing buffers of given lifetimes wastes 10 to 20 % of it. Most
buffers, though, need not be there as early as planned, nor as long. First fit with the first lifetime that fits, and
a repair of what did not fit (take some neighbours out, put all back in another order) bring the waste to almost
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lt_offload.plan.schedule import ALIGNMENT

_UNITS = 8192
"""Resolution of the arena: one bit per unit and step says whether it is taken."""
_REMOVED = (4, 24)
"""How many buffers a repair takes out."""
_STAGNATION = 0.4
"""Part of the repairs after which, if none of them has helped, no more are tried."""
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
    search = _Search(buffers, steps, capacity)
    search.run(rounds)
    return search.packed()


class _Search:
    def __init__(self, buffers: Sequence[Flexible], steps: int, capacity: int) -> None:
        self.buffers, self.steps = buffers, steps
        self.unit = max(capacity // _UNITS // ALIGNMENT, 1) * ALIGNMENT
        self.everything = (1 << max(capacity // self.unit, 0)) - 1
        self.units = [-(-buffer.bytes // self.unit) for buffer in buffers]
        self.taken = [0] * steps
        self.at: list[int | None] = [None] * len(buffers)
        self.chosen = [0] * len(buffers)
        self.living: list[list[int]] = [[] for _ in range(steps)]
        for index, buffer in enumerate(buffers):
            for step in buffer.lifetimes[0]:
                self.living[step].append(index)
        for index in sorted(range(len(buffers)), key=lambda i: (-self.units[i], buffers[i].lifetimes[0][0])):
            self._put(index)

    def run(self, rounds: int) -> None:
        """Repair until everything has a place."""
        generator = random.Random(0)
        cost, improved = self._cost(), 0
        for count in range(rounds):
            if not cost or count - improved > rounds * _STAGNATION:
                return
            before = self.taken.copy(), self.at.copy(), self.chosen.copy()
            removed = self._neighbours(generator)
            for index in removed:
                self._take_out(index)
            power = generator.choice((0.0, 0.5, 1.0))
            urgency = {i: self.units[i] * len(self.buffers[i].lifetimes[0]) ** power for i in removed}
            for index in sorted(removed, key=lambda i: -urgency[i] * generator.uniform(0.5, 1.5)):
                self._put(index)
            changed = self._cost()
            if changed <= cost:
                cost, improved = changed, improved if changed == cost else count
            else:
                self.taken, self.at, self.chosen = before

    def packed(self) -> Packed:
        """Return the result."""
        missing = [0] * self.steps
        for index, at in enumerate(self.at):
            if at is None:
                for step in self.buffers[index].lifetimes[-1]:
                    missing[step] += self.buffers[index].bytes
        offsets = tuple((at or 0) * self.unit for at in self.at)
        return Packed(offsets, tuple(self.chosen), max(missing))

    def _neighbours(self, generator: random.Random) -> list[int]:
        """Return a buffer that has no place and some that live beside it."""
        homeless = generator.choice([index for index, at in enumerate(self.at) if at is None])
        centre, reach = generator.choice(self.buffers[homeless].lifetimes[-1]), generator.choice(_REACH)
        near = {i for step in range(centre - reach, centre + reach + 1) for i in self.living[step % self.steps]}
        candidates = sorted(near - {homeless})
        return [homeless, *generator.sample(candidates, min(len(candidates), generator.randint(*_REMOVED)))]

    def _cost(self) -> int:
        return sum(
            self.units[index] * len(self.buffers[index].lifetimes[-1]) for index, at in enumerate(self.at) if at is None
        )

    def _put(self, index: int) -> None:
        """Place a buffer at the lowest range that is free during the first of its lifetimes that has one."""
        units, taken = self.units[index], self.taken
        for choice, lifetime in enumerate(self.buffers[index].lifetimes):
            used = 0
            for step in lifetime:
                used |= taken[step]
            # Bit i of `starts` says whether the units from i on are free.
            starts, length = self.everything & ~used, 1
            while length < units:
                shift = min(length, units - length)
                starts &= starts >> shift
                length += shift
            if starts:
                at = (starts & -starts).bit_length() - 1
                mask = ((1 << units) - 1) << at
                for step in lifetime:
                    taken[step] |= mask
                self.at[index], self.chosen[index] = at, choice
                return

    def _take_out(self, index: int) -> None:
        at = self.at[index]
        if at is not None:
            mask = ~(((1 << self.units[index]) - 1) << at)
            for step in self.buffers[index].lifetimes[self.chosen[index]]:
                self.taken[step] &= mask
            self.at[index] = None
