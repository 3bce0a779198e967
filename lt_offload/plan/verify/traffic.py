"""The link to the device in time: copies in their order, and what computations read directly in between.

Both share the bandwidth. A computation that reads directly gets all of it until it has what it reads, from its begin
on; copies pause meanwhile and go on afterwards. So at no time more crosses the link than it carries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _QueuedCopy:
    op: int
    begin: float
    finish: float
    seconds: float
    start: list[float]
    """Where to note when it starts and, below, ends: the times of its iteration's ops."""
    end: list[float]

    def note(self) -> None:
        """Write its times down."""
        self.start[self.op], self.end[self.op] = self.begin, self.finish


class Traffic:
    """One link. Copies are given in their order, direct reads as their computations begin, one after the other.

    A copy that was given before may end later for a direct read. Nothing that begins before that read waits for it.
    """

    def __init__(self) -> None:
        self.free = 0.0
        """When the last copy ends."""
        self._copies: list[_QueuedCopy] = []
        self._reads: list[tuple[float, float]] = []
        """When copies pause: those direct reads that end after the last copy began."""

    def copy(self, op: int, ready: float, seconds: float, start: list[float], end: list[float]) -> None:
        """Queue the copy of ``op`` and note when it starts and ends, as far as it is known."""
        begin = max(ready, self.free)
        self._reads = [read for read in self._reads if read[1] > begin]
        at, left = begin, seconds
        for low, high in self._reads:
            if at + left <= low:
                break
            if at < low:
                left -= low - at
            else:
                begin = high
            at = high
        self.free = at + left
        self._copies.append(_QueuedCopy(op, begin, self.free, seconds, start, end))
        self._copies[-1].note()

    def read(self, begin: float, seconds: float) -> None:
        """Carry ``seconds`` of a direct read from ``begin`` on; copies that have not ended by then end later."""
        release_after = begin + seconds
        self._copies = [copy for copy in self._copies if copy.finish > begin]
        free = 0.0
        for copy in self._copies:
            if copy.begin < begin:
                copy.finish += seconds
            else:
                copy.begin = max(copy.begin, release_after, free)
                copy.finish = copy.begin + copy.seconds
            free = copy.finish
            copy.note()
        self.free = max(self.free, free)
        self._reads.append((begin, release_after))
