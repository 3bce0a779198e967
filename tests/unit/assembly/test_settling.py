"""Plans for windows of any decisions are sound, and a settling pass moves what its updates need, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest

from lt_offload import Plan, solve
from lt_offload.errors import InfeasibleError
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.iteration.decisions import TensorDecision
from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.verify.check import check
from lt_offload.plan.windows import with_sums
from lt_offload.schema.accesses import IN_ARENA
from lt_offload.schema.plan import ADDING, Pass
from lt_offload.schema.profile import Profile, ReadProfile
from tests.support.profiles.by_hand import timetable
from tests.support.profiles.program_rules import KINDS, random_profile
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.small import HUGE, chained, changed, resident, small_profile, stays, with_zero_copy


@dataclass
class Presence:
    """A group on the device, from one op of a pass to another."""

    group: int
    low: int
    high: int
    begin: int
    end: int = 10**9
    updated: bool = False


def presences(plan: Plan) -> list[Presence]:
    """What is on the device during the settling pass of ``plan``; ends are those of steps, where ops say so."""
    there: dict[int, Presence] = {}
    found: list[Presence] = []
    leaving: dict[int, list[int]] = defaultdict(list)

    def come(group: int, low: int, begin: int) -> None:
        there[group] = Presence(group, low, low + plan.groups[group].bytes, begin)
        found.append(there[group])

    for copy in plan.initial:
        come(copy.group, copy.offset, -1)
    for op in plan.program("settling"):
        for step in [step for step in leaving if step < op.step]:
            for group in leaving.pop(step):
                there.pop(group).end = op.id
        if op.kind == "update" and op.lane != "host":
            for one in there.values():
                one.updated |= not set(plan.tensors(op)).isdisjoint(plan.groups[one.group].tensors)
        elif op.payload in IN_ARENA and op.kind == "prefetch":
            for group, low in zip(op.groups, op.offsets, strict=True):
                come(group, low, op.id)
        elif op.payload in IN_ARENA and op.kind == "drop":
            for group in op.groups:
                there.pop(group).end = op.id
        elif op.payload in IN_ARENA and op.release_after is not None:
            leaving[op.release_after] += op.groups
    return found


def needless(plan: Plan) -> list[Presence]:
    """What comes in the settling pass of ``plan`` though no update needs it and nothing took its place."""
    on_host = {t for op in plan.ops if op.updates_on_host for t in plan.tensors(op)}
    everything = presences(plan)
    before: dict[tuple[int, int], Presence] = {}
    found = []
    for one in everything:
        former = before.get((one.group, one.low))
        before[one.group, one.low] = one
        if one.begin < 0 or one.updated or not on_host.isdisjoint(plan.groups[one.group].tensors):
            continue
        # Only an update makes something come that was not there at the start.
        away = [other for other in everything if former is not None and other.group != one.group]
        away = [other for other in away if former and other.low < former.high and former.low < other.high]
        if former is None or not any(other.begin < one.begin and former.end < other.end for other in away):
            found.append(one)
    return found


def windows_of(made: Timetable, summed: Profile, *, delayed: bool) -> Plan:
    """The plan for windows of a timetable for ``summed``, a profile with sums."""
    last: Pass = "settling" if delayed else "updating"
    return build(
        made,
        summed,
        planner="test",
        budget_bytes=HUGE,
        host_budget_bytes=HUGE,
        passes=(*ADDING, last),
    )


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_decided_makes_a_sound_plan_for_windows(seed: int, delayed: bool) -> None:
    rng = np.random.default_rng(seed)
    read = ReadProfile(forward_s=2.0, backward_s=3.0, forward_bytes=100, backward_bytes=200)
    states = int(rng.integers(3))
    profile = small_profile(int(rng.integers(2, 6)), states=states, tied=bool(rng.integers(2)), frozen=(2,))
    profile = replace(with_zero_copy(chained(profile), read), machines=int(rng.integers(1, 3)), common_updates=True)
    decisions = random_decisions(rng, profile)
    summed = with_sums(profile, 2)
    made = timetable(decisions, summed, lead=int(rng.integers(5)), lag=int(rng.integers(3)))
    plan = timed(windows_of(made, summed, delayed=delayed), profile)
    assert check(plan, profile) == []
    if delayed:
        assert needless(plan) == []


def middle(profile: Profile) -> int:
    """A budget between the least and one with room for everything."""
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, memory=1, delayed=True)
    assert caught.value.needed_bytes is not None
    everything = sum(3 * one.bytes + one.state_bytes for one in profile.tensors)
    return int(caught.value.needed_bytes + 0.3 * everything)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_every_copy_to_the_device_is_for_an_update_or_brings_back_what_had_to_make_room(seed: int) -> None:
    profile = random_profile(np.random.default_rng(seed), KINDS[seed % len(KINDS)])
    plan = solve(profile, memory=middle(profile), solver_time_limit=1, delayed=True)
    assert check(plan, profile) == []
    assert needless(plan) == []


def test_what_an_update_has_changed_goes_to_the_host_where_other_passes_drop_it() -> None:
    """States that come at the end of a pass for the next one are there in a settling pass, and stay."""
    profile = with_sums(small_profile(3), 2)
    decision = TensorDecision(place="paged", stays=stays((1, 4)), write_back=4)
    made = timetable(changed(resident(profile), 1, decision), profile)
    early = tuple(replace(copy, arrival=5) if copy.payload == "state" and copy.stay else copy for copy in made.copies)
    plan = windows_of(replace(made, copies=early), profile, delayed=True)
    assert check(timed(plan, small_profile(3)), small_profile(3)) == []
    moved = {which: [op for op in plan.program(which) if op.payload == "state"] for which in plan.passes}
    assert [(op.kind, op.release_after) for op in moved["settling"]] == [("offload", None)]
    assert [op.kind for op in moved["accumulating"]] == ["drop", "prefetch"]
