"""Laws of plans: a number that does not bind changes nothing. ``scripts.bench.laws`` measures more of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.errors import InfeasibleError
from lt_offload.plan import Plan, check, solve
from lt_offload.schema.profile import Profile
from scripts.bench.laws import AMPLE, slower
from tests import sampling
from tests.unit.plan.test_planner_bounds import rich_profile, sharing


def planned(profile: Profile, memory: int, ram: int) -> Plan:
    """Return the plan within these bytes."""
    return solve(profile, memory=memory, host_memory=ram, time_limit=1e5)


def the_same(plan: Plan, other: Plan) -> bool:
    """Return whether two plans differ in nothing but their budgets."""
    return other == replace(plan, budget_bytes=other.budget_bytes, host_budget_bytes=other.host_budget_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "share"), sampling.grid(range(10), (0.1, 0.4)))
def test_ram_that_is_not_used_changes_nothing(seed: int, share: float) -> None:
    profile = sharing(rich_profile(seed), seed)
    with pytest.raises(InfeasibleError) as error:
        planned(profile, 1, AMPLE)
    least, most = error.value.needed_bytes, sum(2 * t.bytes + t.state_bytes for t in profile.tensors)
    assert least is not None
    memory = least + int(share * most)
    plan = planned(profile, memory, AMPLE)
    used = plan.predicted.host_peak_bytes
    for part in (1, 1.05, 3):
        other = planned(profile, memory, int(part * used))
        assert check(other, profile) == []
        assert the_same(plan, other)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_device_memory_beyond_what_everything_takes_changes_nothing(seed: int) -> None:
    profile = sharing(rich_profile(seed), seed)
    plan = planned(profile, profile.hardware.device_bytes, AMPLE)
    used = plan.predicted.device_peak_bytes
    for part in (1.1, 2):
        other = planned(profile, int(part * used), AMPLE)
        assert other.predicted.device_peak_bytes <= other.budget_bytes
        assert the_same(plan, other)


def test_violations_are_parts_of_the_shortest_time_before() -> None:
    assert slower([float("inf"), 2.0, 1.0, 1.5, 0.9]) == [0.0, 0.0, 0.5, 0.0]
