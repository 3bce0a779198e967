"""Timetables by hand: everything comes at the last moment and leaves at once, but for what a test says.

What checks, simulates or carries out a plan has to do so for any plan, also one that a person has edited: there the
times are the test's. What planners decide is scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lt_offload.plan.assembly.copies import runs
from lt_offload.plan.assembly.just_in_time import Missed, Scheduler
from lt_offload.plan.assembly.placement import Lifetime, place
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.assembly.timetable import ActivationTimes, Timetable
from lt_offload.plan.assembly.work import LaneWork
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import budget_for
from lt_offload.plan.planners.request import Request
from lt_offload.plan.planners.timed_plan import PlanScheduler, TimedPlan
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.profiles.small import HUGE


def timetable(
    decisions: Decisions,
    profile: Profile,
    *,
    lead: int = 0,
    lag: int = 0,
    arrivals: Mapping[int, tuple[int, ...]] | None = None,
    gradients: Mapping[int, int] | None = None,
    activations: Mapping[int, tuple[int, int]] | None = None,
) -> Timetable:
    """Return times and places for ``decisions``.

    Args:
        lead: steps by which copies come before their first use, as far as what they copy is there.
        lag: steps after which gradients and activations have left.
        arrivals: per tensor, the steps in which the stays of its weight begin.
        gradients: per tensor, the step at whose end its gradient has left.
        activations: per block, the step at whose end they have left, and that in which they come back.
    """
    sets = Sets(decisions, profile)
    said, steps = arrivals or {}, sets.steps
    before = {id(copy): stay for stay in sets.stays for copy in (stay.group.copies if stay.group else ())}
    at: dict[int, int] = {}
    for index, decision in enumerate(decisions.tensors):
        weights = [copy for copy in sets.copies if copy.payload == "weight" and copy.tensor == index]
        if decision.stays:
            at.update(zip(map(id, weights), said.get(index, ()), strict=index in said))
    groups = runs(sets.copies, decisions, profile)
    lives: list[Lifetime] = []
    for group in groups:
        if group.stay is None:
            lives.append(Lifetime(group.room, 0, steps - 1))
            continue
        stay = before[id(group.copies[0])]
        arrival = at.get(id(group.copies[0]), (stay.need - min(lead, stay.lead)) % steps)
        lives.append(Lifetime(group.room, arrival, group.stay.end))
    placed = place(lives, steps)
    copies = {}
    for group, life, offset in zip(groups, lives, placed.offsets, strict=True):
        for copy in group.copies:
            copies[copy] = replace(copy, offset=offset, arrival=life.start)
            offset += copy.room
    return Timetable(
        sets=sets,
        copies=tuple(copies[copy] for copy in sets.copies),
        arena_bytes=placed.extent,
        activations=_activations(sets, lead, lag, activations or {}),
        gradients={
            t: (gradients or {}).get(t, min(step + lag, steps - 1))
            for step, parts in enumerate(sets.gradients)
            for tensors in parts
            for t in tensors
        },
        seconds=0.0,
    )


def _activations(sets: Sets, lead: int, lag: int, said: Mapping[int, tuple[int, int]]) -> dict[int, ActivationTimes]:
    found = {}
    for stay in sets.stays:
        if stay.group is None:
            gone = min(sets.timeline.forward(stay.block) + lag, stay.need - 1)
            gone, back = said.get(stay.block, (gone, max(stay.need - lead, gone + 1)))
            found[stay.block] = ActivationTimes(release_after=gone, prefetch_at=back, turn=0)
    return found


def built(decisions: Decisions, profile: Profile, *, budget: int = HUGE, **times: Any) -> Plan:
    """Return the plan with times by hand, those of :func:`timetable`."""
    found = timetable(decisions, profile, **times)
    return build(found, profile, planner="test", budget_bytes=budget, host_budget_bytes=HUGE)


def scheduled(decisions: Decisions, profile: Profile, *, share: float = 1.0) -> Plan:
    """Return the plan as production makes it, with ``share`` times the least room that is surely enough."""
    sets = Sets(decisions, profile)
    room = int(share * sets.room_needed)
    found = Scheduler(LaneWork(sets, profile), room).start()
    assert not isinstance(found, Missed)
    budget = room + budget_for(0, profile)
    return build(found, profile, planner="test", budget_bytes=budget, host_budget_bytes=HUGE)


def timed_plan(planner: str, decisions: Decisions, request: Request) -> TimedPlan | Missed:
    """Return the fastest plan found for ``decisions``."""
    search = PlanScheduler(planner, Sets(decisions, request.profile), request)
    # start() returns what is missing, or nothing where there is a schedule, which finish() then makes a plan of.
    return search.start() or search.finish()
