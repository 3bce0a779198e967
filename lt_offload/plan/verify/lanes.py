"""Lanes in time: the work of each and its speed, where they share links and the host's memory.

Two things share their speed. What computations read and write in host memory crosses the links beside the copies: both
get half of the link. And what lanes take of the host's memory is limited: where it is not enough for all, each gets
what it asks for or an equal part, whichever is less (:class:`lt_offload.schema.profile.Contention`).
"""

from __future__ import annotations

import math

from lt_offload.schema.lanes import LANES
from lt_offload.schema.profile import Contention

NUMBER = {lane.name: number for number, lane in enumerate(LANES)}
COMPUTE, H2D, D2H, HOST = NUMBER["compute"], NUMBER["h2d"], NUMBER["d2h"], NUMBER["host"]
READ, WRITE = len(LANES), len(LANES) + 1
"""Reads and writes of computations in host memory while they run, beside their lane."""
_WORKING = len(LANES) + 2
_LINKS = ((H2D, READ), (D2H, WRITE))
_TOLERANCE = 1e-12
"""Relative to the clock: ends that are nearer to each other than this are one moment."""


def rates(contention: Contention, busy: int) -> tuple[float, ...]:
    """Return the speed of each lane relative to its speed alone, if those whose bits are set in ``busy`` have work.

    Those of idle lanes are 0.
    """
    speeds = [1.0 if busy >> lane & 1 else 0.0 for lane in range(_WORKING)]
    for pair in _LINKS:
        if all(speeds[lane] for lane in pair):
            for lane in pair:
                speeds[lane] = 0.5
    shares = (*(contention.of(lane.name) for lane in LANES), contention.h2d, contention.d2h)
    wanted = {lane: speeds[lane] * shares[lane] for lane in range(_WORKING) if speeds[lane] * shares[lane]}
    left, waiting = 1.0, len(wanted)
    # Who asks for least comes first, so that what it leaves of its part is divided among the others.
    for lane in sorted(wanted, key=wanted.__getitem__):
        granted = min(wanted[lane], left / waiting)
        speeds[lane] = granted / shares[lane]
        left, waiting = left - granted, waiting - 1
    return tuple(speeds)


class SimulatedLanes:
    """The lanes, each with one piece of work at most, and a clock."""

    def __init__(self, contention: Contention) -> None:
        self.now = 0.0
        self.busy = 0
        """Bit mask of the lanes that have work."""
        self.ends = [math.inf] * _WORKING
        """End of each lane's work if nothing else begins or ends before; true after :meth:`settle`."""
        self._contention = contention
        self._rates: dict[int, tuple[float, ...]] = {}
        """By the set of busy lanes."""
        self._rate: tuple[float, ...] = (0.0,) * _WORKING
        self._settled = 0
        """The lanes whose end is that with ``_rate``; that of others is their end alone."""

    def begin(self, lane: int, seconds: float) -> None:
        """Give an idle ``lane`` work that takes ``seconds`` alone."""
        self.busy |= 1 << lane
        # Until the next `settle` its end is that of work alone, whatever the others' ends were made with.
        self._settled &= ~(1 << lane)
        self.ends[lane] = self.now + seconds

    def end(self, lane: int) -> None:
        """Take the work of ``lane`` away."""
        self.busy &= ~(1 << lane)
        self.ends[lane] = math.inf

    def settle(self) -> None:
        """Adapt the ends to the lanes that are busy now."""
        busy = self.busy
        if busy == self._settled:
            return
        if busy not in self._rates:
            self._rates[busy] = rates(self._contention, busy)
        before, now = self._rate, self._rates[busy]
        for lane in range(_WORKING):
            if busy >> lane & 1:
                rate = before[lane] if self._settled >> lane & 1 else 1.0
                # What is left to do does not change, only how fast it goes from here on.
                if rate != now[lane]:
                    self.ends[lane] = self.now + (self.ends[lane] - self.now) * rate / now[lane]
        self._rate, self._settled = now, busy

    def done(self) -> list[int]:
        """Return the lanes whose work ends now."""
        limit = self.now * (1 + _TOLERANCE)
        return [lane for lane in range(_WORKING) if self.ends[lane] <= limit]
