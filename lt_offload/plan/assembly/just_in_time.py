"""Search for the division of the device's memory, and the way to fill the arena, with which decisions run fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from lt_offload.plan.assembly.ranges import Policy
from lt_offload.plan.assembly.schedule import schedule, schedule_in_place
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.assembly.work import LaneWork
from lt_offload.schema.profile import Profile

_SHARES = (0.5, 0.25, 0.75)
"""Shares of the divisible memory for the arena, the best guess first, if the share for the next block fails."""
_FINER = 1 / 8
_WAYS: tuple[tuple[Policy, float], ...] = (
    ("oldest", 0.8),
    ("next", 0.95),
    ("lowest", 1.0),
    ("oldest", 0.95),
    ("next", 0.9),
    ("lowest", 0.9),
)
"""Ways to fill the arena, and how full, the best guess first."""
_BEST = 4
"""Number of the first of these ways that are tried where schedules take long."""
_FEW_STEPS = 80
"""With more steps, schedules take long."""
_ENOUGH = 1.001
"""A schedule that is this near to the sum of the computations is not improved any more; only its arena gets smaller."""
_SMALLER = 5
"""The most times that the arena's share is halved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """Bytes by which decisions miss the device and the host budget; without a schedule at least 1 of one of them."""

    device: int = 0
    host: int = 0


@dataclass(frozen=True, slots=True)
class _Division:
    """One way to schedule."""

    share: float
    """The arena's share of the divisible memory."""
    policy: Policy
    full: float


class Scheduler:
    """Looks for the fastest schedule of ``work`` within ``capacity_bytes`` of device memory."""

    def __init__(self, work: LaneWork, capacity_bytes: int, deadline: float = math.inf) -> None:
        """``deadline``: the time on the monotonic clock at which the search ends."""
        self._work, self._sets = work, work.sets
        self._capacity, self._deadline = capacity_bytes, deadline
        self.best: Timetable | None = None
        """The fastest so far."""
        self._division = _Division(_SHARES[0], *_WAYS[0])
        """The division of the fastest."""
        self._tried: set[_Division] = set()
        self._slow = self._sets.steps > _FEW_STEPS
        self._room = capacity_bytes - self._sets.least_arena - self._sets.least_framework
        # An arena in which every stay has a range of its own gains nothing from more.
        self._useful = min(self._room, self._sets.most_arena - self._sets.least_arena)

    @property
    def _enough(self) -> float:
        return _ENOUGH * sum(self._work.seconds)

    def start(self, *, tries: int | None = None, allow_no_prefetch: bool = True) -> Timetable | Missed:
        """Return the best of a few schedules, enough to compare sets.

        Args:
            tries: how many, if one of them is found; one compares sets of the same kind well enough. None: as many as
                there is time for.
            allow_no_prefetch: if none is found, also one in which nothing comes early.
        """
        if self._room < 0:
            return Missed(device=-self._room)
        first = [_Division(self._next_fits, *way) for way in (_WAYS[0], _WAYS[1])]
        tries = tries or (len(first) if self._slow else len(first) + len(_SHARES))
        for count, division in enumerate([*first, *(_Division(share, *_WAYS[1]) for share in _SHARES)]):
            if self.best is None or count < tries:
                self._try([division])
        if self.best is None and allow_no_prefetch:
            self._try(_Division(_SHARES[0], *way) for way in _WAYS[2:])
        if self.best is None and allow_no_prefetch:
            # Nothing fits when copies may come early; with a place for everything beforehand only the sizes decide.
            arena = self._sets.tight_arena
            over = arena + self._sets.least_framework - self._capacity
            if over > 0:
                return Missed(device=over)
            self.best = schedule_in_place(self._work, arena, self._capacity - arena)
        # Not looked for to the end, so nobody knows how much is missing.
        return self.best or Missed(device=1)

    @property
    def _next_fits(self) -> float:
        """The largest share that leaves room for activations of one more block, beside gradients on their way out.

        With more, copies of activations and computations take turns; with less, weights come later than they could.
        """
        room = self._room - self._sets.most_arriving - self._sets.most_leaving
        return min(max(room / self._useful, 0.0), 1.0) if self._useful > 0 else 0.0

    def finish(self) -> Timetable:
        """Return the best of many schedules; after :meth:`start` has found one."""
        assert self.best is not None
        share = self._division.share
        self._try(_Division(share, *way) for way in (_WAYS[:_BEST] if self._slow else _WAYS))
        for step in (-_FINER, _FINER):
            share = min(max(self._division.share + step, 0.0), 1.0)
            ways = [(self._division.policy, self._division.full), *(() if self._slow else _WAYS[:3])]
            self._try(_Division(share, *way) for way in ways)
        share = self._division.share
        for _ in range(_SMALLER if self.best.seconds <= self._enough else 0):
            share /= 2
            smaller = self._schedule(_Division(share, "oldest", 1.0))
            if smaller is None or smaller.seconds > self._enough:
                break
            self.best = smaller
        return self.best

    def again(self, profile: Profile) -> Timetable | None:
        """Return the schedule with other speeds, those of ``profile``, for the same division; None if it fails."""
        self._work = LaneWork(self._sets, profile)
        again = self._schedule(self._division)
        # Even a slower one: at the other speeds the times of the old one are wrong.
        self.best = again or self.best
        return again

    def _try(self, divisions: Iterable[_Division]) -> None:
        for division in divisions:
            if self.best is not None and (self.best.seconds <= self._enough or time.monotonic() > self._deadline):
                return
            if division in self._tried:
                continue
            self._tried.add(division)
            timetable = self._schedule(division, math.inf if self.best is None else self.best.seconds)
            if timetable is not None and (self.best is None or timetable.seconds < self.best.seconds):
                self.best, self._division = timetable, division

    def _schedule(self, division: _Division, beat_s: float = math.inf) -> Timetable | None:
        arena = self._sets.least_arena + int(division.share * self._useful)
        return schedule(
            self._work, arena, self._capacity - arena, part=division.full, policy=division.policy, beat_s=beat_s
        )
