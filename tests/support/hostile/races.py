"""Happens-before checker: are any two accesses to one thing, at least one of them a write, ordered by lanes and events?

It knows the program as it was submitted, not how it happened to run: a missing dependency is found even where the tasks
came out in the right order. Clocks are vector clocks with one entry per lane; the compute lane is one of them. As the
lanes ``host`` and ``peers`` keep no order, there every strand (the same update, iteration after iteration) counts as a
lane. What a finished ``synchronize`` or ``drain`` has shown to the calling thread orders everything submitted later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from weakref import WeakKeyDictionary

from lt_offload.execute.device.base import Buffer, Cell
from lt_offload.execute.device.lanes import LOOSE

Clock = tuple[int, ...]
"""Entries that are missing at the end are 0."""

ORIGIN: Clock = ()
"""Before everything."""


class Race(AssertionError):
    """Two accesses to one thing, at least one of them a write, that nothing orders."""


@dataclass(frozen=True, slots=True)
class Access:
    """Somebody touched something at a point of a lane."""

    lane: str
    index: int
    """Of the lane or strand in clocks."""
    tick: int
    write: bool
    by: str
    what: str

    def before(self, clock: Clock) -> bool:
        """Return whether work with ``clock`` is ordered after the access."""
        return _at(clock, self.index) >= self.tick

    def __str__(self) -> str:
        return f'"{self.by}" on {self.lane} {"writes" if self.write else "reads"} {self.what}'


@dataclass(slots=True)
class History:
    """The accesses to a cell that a new one must be ordered after."""

    accesses: list[Access] = field(default_factory=list)
    defined: bool = True
    """Something was written; False for arena memory just placed."""
    freed: bool = False
    releases: tuple[Clock, ...] = ()
    """What a write has to be ordered after because of who had the range before; as long as nobody has written it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Freed:
    """A free range of the arena that was used before."""

    start: int
    end: int
    accesses: tuple[Access, ...]
    releases: tuple[Clock, ...]


class Checker:
    """Follows the clocks of all lanes. Called on one thread, in the order of submission."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, int], int] = {("compute", 0): 0}
        self._clocks: dict[int, Clock] = {0: (1,)}
        """By index."""
        self._known = ORIGIN
        self._histories: WeakKeyDictionary[Cell, History] = WeakKeyDictionary()
        self._freed: list[_Freed] = []
        """Disjoint."""

    def history(self, cell: Cell) -> History:
        """Return the accesses to ``cell`` that count."""
        return self._histories.setdefault(cell, History())

    def task(
        self,
        lane: str,
        label: str,
        after: Iterable[Clock],
        reads: Sequence[Cell],
        writes: Sequence[Cell],
        strand: int = 0,
    ) -> Clock:
        """Account for a task on ``lane`` and return the clock of its completion.

        ``strand`` tells tasks of lanes without an order apart.
        """
        index = self._indices.setdefault((lane, strand if lane in LOOSE else 0), len(self._indices))
        clock = _merge(self._clocks.get(index, ORIGIN), self._known, *after)
        clock = (*clock[:index], *(0,) * (index - len(clock)), _at(clock, index) + 1, *clock[index + 1 :])
        self._clocks[index] = clock
        self._access(lane, index, clock, label, reads, writes)
        return clock

    def wait(self, label: str, after: Iterable[Clock], reads: Sequence[Cell], writes: Sequence[Cell]) -> None:
        """The compute lane is ordered after ``after`` from now on and goes on to access ``reads`` and ``writes``."""
        clock = self._clocks[0] = _merge(self._clocks[0], *after)
        self._access("compute", 0, clock, label, reads, writes)

    def mark(self, label: str, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Clock:
        """The compute lane has accessed ``reads`` and ``writes``; return the clock of all that it was given so far."""
        clock = self._clocks[0]
        self._access("compute", 0, clock, label, reads, writes)
        self._clocks[0] = (clock[0] + 1, *clock[1:])
        return clock

    def synchronize(self, clocks: Iterable[Clock]) -> None:
        """The calling thread has seen these completions: whatever it submits later, to any lane, comes after them."""
        self._known = _merge(self._known, *clocks)
        self._clocks[0] = _merge(self._clocks[0], self._known)

    def drain(self) -> None:
        """The calling thread has seen all lanes idle."""
        self.synchronize([clock for index, clock in self._clocks.items() if index])

    def place(self, buffer: Buffer) -> None:
        """``buffer`` is new memory: whoever had the range before is remembered."""
        start, end = buffer.offset, buffer.offset + buffer.nbytes
        taken = [freed for freed in self._freed if freed.start < end and start < freed.end]
        if taken:
            rest = [replace(freed, end=start) for freed in taken if freed.start < start]
            rest += [replace(freed, start=end) for freed in taken if end < freed.end]
            self._freed = [freed for freed in self._freed if freed not in taken] + rest
        accesses = dict.fromkeys(access for freed in taken for access in freed.accesses)
        releases = dict.fromkeys(clock for freed in taken for clock in freed.releases)
        self._histories[buffer] = History(list(accesses), defined=False, releases=tuple(releases))

    def free(self, buffer: Buffer, after: Iterable[Clock]) -> None:
        """Nobody may touch ``buffer`` any more; whoever writes its memory next is ordered after ``after``."""
        history = self.history(buffer)
        history.freed = True
        if buffer.nbytes:
            end, releases = buffer.offset + buffer.nbytes, (*after, *history.releases)
            self._freed.append(_Freed(buffer.offset, end, tuple(history.accesses), releases))

    def forget_memory(self) -> None:
        """The arena is another one."""
        self._freed.clear()

    def _access(
        self, lane: str, index: int, clock: Clock, by: str, reads: Sequence[Cell], writes: Sequence[Cell]
    ) -> None:
        # Reads first: who reads and writes a thing needs it to be defined before.
        for write, cells in ((False, reads), (True, writes)):
            for cell in cells:
                _check(self.history(cell), Access(lane, index, clock[index], write, by, _name(cell)), clock)


def _check(history: History, new: Access, clock: Clock) -> None:
    if history.freed:
        raise Race(f"{new} after it was freed")
    if not (history.defined or new.write):
        raise Race(f"{new} before anything was written to it")
    for old in history.accesses:
        if (old.write or new.write) and not old.before(clock):
            raise Race(f"{new}, not ordered after: {old}")
    if new.write:
        history.accesses[:] = [new]
        history.defined, history.releases = True, ()
    else:
        history.accesses[:] = [a for a in history.accesses if a.write or a.index != new.index] + [new]


def _merge(clock: Clock, *others: Clock) -> Clock:
    return tuple(max(entries) for entries in zip_longest(clock, *others, fillvalue=0)) if others else clock


def _at(clock: Clock, index: int) -> int:
    return clock[index] if index < len(clock) else 0


def _name(cell: Cell) -> str:
    if isinstance(cell, Buffer):
        return f"device buffer '{cell.label}' at [{cell.offset}, {cell.offset + cell.nbytes})"
    return f"'{cell.label}'"
