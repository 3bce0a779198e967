"""Happens-before checker: are any two accesses to one thing, at least one of them a write, ordered by lanes and events?

It knows the program as it was submitted, not how it happened to run: a missing dependency is found even where the tasks
came out in the right order. Clocks are vector clocks with one entry per lane; the compute lane is one of them. As the
lanes ``host`` and ``peers`` keep no order, there every strand (the same update, iteration after iteration) counts as a
lane. What a finished ``synchronize`` or ``drain`` has shown to the calling thread orders everything submitted later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from lt_offload.errors import Race
from lt_offload.execute.device.base import LOOSE, Buffer, Cell

Clock = tuple[int, ...]
"""Entries that are missing at the end are 0."""

ORIGIN: Clock = ()
"""Before everything."""


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


class Checker:
    """Follows the clocks of all lanes. Called on one thread, in the order of submission."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, int], int] = {("compute", 0): 0}
        self._clocks: dict[int, Clock] = {0: (1,)}
        """By index."""
        self._known = ORIGIN

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

    def known(self, clocks: Iterable[Clock], accesses: Iterable[Access]) -> bool:
        """Return whether everything submitted from now on is ordered after all of these anyway."""
        return all(_merge(self._known, clock) == self._known for clock in clocks) and all(
            access.before(self._known) for access in accesses
        )

    def place(self, buffer: Buffer, accesses: Iterable[Access]) -> None:
        """``buffer`` is new memory, last touched by ``accesses``."""
        buffer.history = History(list(accesses), defined=False)

    def free(self, buffer: Buffer) -> list[Access]:
        """Nobody may touch ``buffer`` any more; return what the next user of its memory must be ordered after."""
        history: History = buffer.history
        history.freed = True
        return history.accesses

    def _access(
        self, lane: str, index: int, clock: Clock, by: str, reads: Sequence[Cell], writes: Sequence[Cell]
    ) -> None:
        # Reads first: who reads and writes a thing needs it to be defined before.
        for write, cells in ((False, reads), (True, writes)):
            for cell in cells:
                if cell.history is None:
                    cell.history = History()
                _check(cell.history, Access(lane, index, clock[index], write, by, _name(cell)), clock)


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
        history.defined = True
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
