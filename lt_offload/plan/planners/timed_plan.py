"""From a proposal's sets to a plan with times: scheduled, built and simulated, with care only where it may win.

A schedule's clock knows each lane by itself. Where lanes slow each other down, a plan is simulated, and scheduled again
with lanes as slow as they were on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lt_offload.plan.assembly.just_in_time import Missed, Scheduler
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.assembly.work import LaneWork
from lt_offload.plan.planners.request import Request, cannot_win
from lt_offload.plan.planners.slowdown import expected, is_near, shares, slower, with_slower_lanes
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Trace

_CORRECTIONS = 2
"""Corrections of the clock, at most."""
_AS_SLOW = 0.02
"""Part of a lane's time up to which it counts as expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPlan:
    """A plan and its simulation; its gradients share no memory on the host yet."""

    timetable: Timetable
    plan: Plan
    trace: Trace

    @property
    def seconds(self) -> float:
        """Simulated time of an iteration."""
        return self.trace.iteration_time


class PlanScheduler:
    """The sets of one proposal on their way to a plan."""

    def __init__(self, planner: str, sets: Sets, request: Request) -> None:
        self._planner, self._request, self._profile = planner, request, request.profile
        self._slower = expected(request.profile, LaneWork(sets, request.profile).busy_s)
        work = LaneWork(sets, with_slower_lanes(self._profile, self._slower))
        self._search = Scheduler(work, request.capacity_bytes, request.deadline)
        self.best: TimedPlan | None = None
        self._corrected = False

    def start(self, *, allow_no_prefetch: bool = True) -> Missed | None:
        """Try a few schedules; return by how much the sets miss the budget if there is none.

        ``allow_no_prefetch``: also one in which nothing comes early.
        """
        outcome = self._search.start(allow_no_prefetch=allow_no_prefetch)
        return outcome if isinstance(outcome, Missed) else None

    @property
    def seconds(self) -> float:
        """About how long an iteration takes, by the clock of the best schedule so far."""
        assert self._search.best is not None
        return self._search.best.seconds

    def simulated(self) -> TimedPlan:
        """Return the plan of the best schedule so far."""
        assert self._search.best is not None
        return self.best or self._build(self._search.best)

    def finish(self, beat_s: float = math.inf) -> TimedPlan:
        """Return the fastest plan found; with less care if one that takes ``beat_s`` is out of reach."""
        assert self._search.best is not None
        self.best = self.simulated()
        if shares(self._profile) and not self._corrected:
            self._corrected = True
            self._correct()
        # The careful search costs the most time, and what is so much slower will not win by it.
        if cannot_win(self.best.seconds, beat_s):
            return self.best
        self._build(self._search.finish())
        return self.best

    def _build(self, timetable: Timetable) -> TimedPlan:
        profile = self._profile
        plan = build(
            timetable,
            profile,
            planner=self._planner,
            budget_bytes=self._request.budget_bytes,
            host_budget_bytes=self._request.host_budget_bytes,
        )
        timed = TimedPlan(timetable=timetable, plan=plan, trace=simulate(plan, profile))
        if self.best is None or timed.seconds < self.best.seconds:
            self.best = timed
        return timed

    def _correct(self) -> None:
        last = self.best
        for _ in range(_CORRECTIONS):
            assert last is not None
            shown = slower(last.plan, last.trace)
            if is_near(shown, self._slower, _AS_SLOW):
                return
            self._slower = shown
            timetable = self._search.again(with_slower_lanes(self._profile, shown))
            if timetable is None:
                return
            last = self._build(timetable)


def estimated_s(sets: Sets, request: Request) -> float:
    """Return about how long ``sets`` take, to compare those of one kind; infinity if they do not fit.

    One schedule, with lanes as slow as they would be if each were busy at any time.
    """
    profile = request.profile
    profile = with_slower_lanes(profile, expected(profile, LaneWork(sets, profile).busy_s))
    outcome = Scheduler(LaneWork(sets, profile), request.capacity_bytes).start(tries=1, allow_no_prefetch=False)
    return math.inf if isinstance(outcome, Missed) else outcome.seconds
