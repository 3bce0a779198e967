"""Schedules are just in time: their clock is the simulator's, they fit, and lose little to what the program says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.errors import InfeasibleError
from lt_offload.plan import check, simulate
from lt_offload.plan.assembly.just_in_time import Missed, Scheduler
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.assembly.work import LaneWork
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import room_within
from lt_offload.plan.planners.baselines import option_sets, streaming_decisions
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.program import RelaxedPrograms
from lt_offload.plan.planners.offmate.rounding import round_tensors
from lt_offload.plan.planners.request import allowed_options
from lt_offload.schema.profile import Profile
from scripts.planning import just_in_time
from tests.support.profiles.fixtures import GB, llama7b_b4
from tests.unit.plan.test_planner_bounds import rich_profile

HUGE = 1 << 50


def sets_of(profile: Profile, budget: int) -> Decisions | None:
    config = OffmateConfig(budget_bytes=budget, host_budget_bytes=HUGE, lag=0, lookahead=0)
    try:
        return round_tensors(RelaxedPrograms(profile, config).solution(budget, HUGE, 60.0), profile)
    except InfeasibleError:
        return None


def streamed(profile: Profile, *, host_update: bool) -> Decisions:
    allowed = tuple(allowed_options(block, OffmateConfig(budget_bytes=None), discard=False) for block in profile.blocks)
    options = option_sets(profile, allowed)[0]
    return streaming_decisions(profile, options, host_update=host_update)


@pytest.mark.parametrize("share", [0.45, 0.8, 1.6])
@pytest.mark.parametrize("seed", range(8))
def test_a_schedule_fits_and_its_clock_is_the_simulators(seed: int, share: float) -> None:
    print(f"seed {seed}")
    profile = rich_profile(seed)
    # What launches take is not in the schedule's clock.
    profile = replace(profile, blocks=tuple(replace(block, launch_s=0.0) for block in profile.blocks))
    budget = int(share * sum(2 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors))
    proposals = [sets_of(profile, budget), streamed(profile, host_update=False), streamed(profile, host_update=True)]
    scheduled = 0
    for decisions in proposals:
        if decisions is None:
            continue
        found = Scheduler(LaneWork(Sets(decisions, profile), profile), room_within(budget, profile)).start()
        if isinstance(found, Missed):
            continue
        scheduled += 1
        plan = build(
            found,
            profile,
            planner="test",
            budget_bytes=budget,
            host_budget_bytes=HUGE,
        )
        assert check(plan, profile) == []
        trace = simulate(plan, profile)
        assert trace.device_peak <= budget
        # Nearly always equal: of what is on its way at the end of an iteration the clock knows the first use only.
        assert trace.iteration_time == pytest.approx(found.seconds, rel=0.13)
        assert plan.update_places == tuple(decision.place for decision in decisions.tensors)
        assert plan.options == decisions.options
    assert scheduled or share == 0.45


@pytest.mark.parametrize("memory", [6, 7, 8])
def test_little_is_lost_to_the_program(memory: int) -> None:
    """The program counts what is on its way for whole steps, so that a schedule may even be faster.

    One rounding of one of its equally good solutions: the search schedules several.
    """
    profile, budget = llama7b_b4(8), int(memory * GB)
    config = OffmateConfig(budget_bytes=budget, host_budget_bytes=HUGE, lag=1, lookahead=1)
    expected = RelaxedPrograms(profile, config).solution(budget, HUGE, 60.0).iteration_s
    decisions = sets_of(profile, budget)
    assert decisions is not None
    found = just_in_time(Sets(decisions, profile), profile, room_within(budget, profile))
    assert not isinstance(found, Missed)
    assert found.seconds <= 1.08 * expected


def test_what_does_not_fit_says_by_how_much() -> None:
    profile = llama7b_b4(4)
    decisions = streamed(profile, host_update=True)
    sets = Sets(decisions, profile)
    least = sets.least_arena + sets.least_framework
    assert just_in_time(sets, profile, least - 1000) == Missed(device=1000)
    found = just_in_time(sets, profile, int(1.1 * least))
    assert not isinstance(found, Missed)
    assert found.arena_bytes <= 1.1 * least - sets.least_framework


def test_with_a_slow_link_it_is_never_idle() -> None:
    """Every weight comes twice an iteration and nothing else: that is how long it takes."""
    profile = llama7b_b4(6)
    slow = replace(profile, hardware=replace(profile.hardware, h2d_bytes_per_s=2 * GB, d2h_bytes_per_s=1000 * GB))
    slow = replace(slow, optimizer=replace(slow.optimizer, host_bytes_per_s=1000 * GB))
    decisions = streamed(slow, host_update=True)
    found = just_in_time(Sets(decisions, slow), slow, room_within(int(12 * GB), slow))
    assert not isinstance(found, Missed)
    copied = sum(
        tensor.bytes * len(decision.stays) for tensor, decision in zip(slow.tensors, decisions.tensors, strict=True)
    )
    copied += sum(decisions.offloaded(block, slow) for block in range(len(slow.blocks)))
    assert found.seconds == pytest.approx(copied / (2 * GB), rel=0.02)
