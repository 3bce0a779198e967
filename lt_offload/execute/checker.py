"""Happens-before checker: are any two accesses to one thing, at least one of them a write, ordered by lanes and events?

It knows the program as it was submitted, not how it happened to run: a missing dependency is found even where the tasks
came out in the right order. Clocks are vector clocks with one entry per lane; the compute lane is one of them. What a
finished ``synchronize`` or ``drain`` has shown to the calling thread orders everything submitted later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lt_offload.errors import Race
from lt_offload.execute.device import Buffer, Cell

Clock = tuple[int, ...]

LANES = ("compute", "h2d", "d2h", "host")
ORIGIN: Clock = (0,) * len(LANES)
"""Before everything."""


@dataclass(frozen=True, slots=True)
class Access:
    """Somebody touched something at a point of a lane."""

    lane: int
    tick: int
    write: bool
    by: str
    what: str

    def before(self, clock: Clock) -> bool:
        """Return whether work with ``clock`` is ordered after the access."""
        return clock[self.lane] >= self.tick

    def __str__(self) -> str:
        return f'"{self.by}" on {LANES[self.lane]} {"writes" if self.write else "reads"} {self.what}'


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
        self._clocks = dict.fromkeys(LANES, ORIGIN)
        self._clocks["compute"] = (1, *ORIGIN[1:])
        self._known = ORIGIN

    def task(
        self, lane: str, label: str, after: Iterable[Clock], reads: Sequence[Cell], writes: Sequence[Cell]
    ) -> Clock:
        """Account for a task on ``lane`` and return the clock of its completion."""
        index = LANES.index(lane)
        clock = _merge(self._clocks[lane], self._known, *after)
        clock = (*clock[:index], clock[index] + 1, *clock[index + 1 :])
        self._clocks[lane] = clock
        self._access(index, clock, label, reads, writes)
        return clock

    def wait(self, label: str, after: Iterable[Clock], reads: Sequence[Cell], writes: Sequence[Cell]) -> None:
        """The compute lane is ordered after ``after`` from now on and goes on to access ``reads`` and ``writes``."""
        clock = self._clocks["compute"] = _merge(self._clocks["compute"], *after)
        self._access(0, clock, label, reads, writes)

    def mark(self, label: str, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Clock:
        """The compute lane has accessed ``reads`` and ``writes``; return the clock of all that it was given so far."""
        clock = self._clocks["compute"]
        self._access(0, clock, label, reads, writes)
        self._clocks["compute"] = (clock[0] + 1, *clock[1:])
        return clock

    def synchronize(self, clocks: Iterable[Clock]) -> None:
        """The calling thread has seen these completions: whatever it submits later, to any lane, comes after them."""
        self._known = _merge(self._known, *clocks)
        self._clocks["compute"] = _merge(self._clocks["compute"], self._known)

    def drain(self) -> None:
        """The calling thread has seen all lanes idle."""
        self.synchronize([self._clocks[lane] for lane in LANES[1:]])

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

    def _access(self, lane: int, clock: Clock, by: str, reads: Sequence[Cell], writes: Sequence[Cell]) -> None:
        # Reads first: who reads and writes a thing needs it to be defined before.
        for write, cells in ((False, reads), (True, writes)):
            for cell in cells:
                if cell.history is None:
                    cell.history = History()
                _check(cell.history, Access(lane, clock[lane], write, by, _name(cell)), clock)


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
        history.accesses[:] = [a for a in history.accesses if a.write or a.lane != new.lane] + [new]


def _merge(clock: Clock, *others: Clock) -> Clock:
    return tuple(map(max, clock, *others)) if others else clock


def _name(cell: Cell) -> str:
    if isinstance(cell, Buffer):
        return f"device buffer '{cell.label}' at [{cell.offset}, {cell.offset + cell.nbytes})"
    return f"'{cell.label}'"
