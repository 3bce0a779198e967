"""What plans leave to the framework's allocator: bytes that were measured, and at least a part of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.plan import check, solve
from lt_offload.plan.iteration.memory import budget_for, computation_bytes, room_within
from lt_offload.schema.profile import Profile
from tests.support.profiles.small import small_profile


def profile(**changes: object) -> Profile:
    found = small_profile(6)
    return replace(found, **{"slack_share": 0.02, "page_table_bytes": 13} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("slack", [0, 3000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_a_budget_and_the_room_in_it_are_inverse(slack: int, share: float) -> None:
    found = profile(slack_bytes=slack, slack_share=share)
    for room in [*range(300), 10**6, 10**9 + 7, 123_456_789_012]:
        budget = budget_for(room, found)
        assert room_within(budget, found) == room
        assert room_within(budget - 1, found) < room
    for budget in [*range(5000, 5300), 10**10 + 1]:
        assert budget_for(room_within(budget, found), found) <= budget


def test_slack_is_what_was_measured_or_a_part_of_all() -> None:
    always = small_profile(6).hardware.context_bytes + small_profile(6).shared_bytes + 13
    assert budget_for(10_000, profile(slack_bytes=500)) == 10_000 + always + 500
    assert budget_for(100_000, profile(slack_bytes=500)) == int(1.02 * (100_000 + always))


@pytest.mark.parametrize("planner", ["auto", "offmate", "stream", "greedy", "l2l", "pofo", "resident"])
def test_every_planner_leaves_it(planner: str) -> None:
    found = profile()
    resident = solve(found, planner="resident")
    budget = resident.predicted.device_peak_bytes
    plan = solve(found, memory=budget, planner=planner)  # type: ignore[arg-type]
    assert check(plan, found) == []
    held = computation_bytes(plan, replace(found, slack_share=0.0))
    assert int(held.max()) * 1.02 <= budget + 1
    assert plan.predicted.device_peak_bytes <= budget


def test_a_plan_says_what_it_leaves_to_the_context_and_how_the_host_updates() -> None:
    found = profile()
    plan = solve(replace(found, optimizer=replace(found.optimizer, host_threads=7)), planner="resident")
    assert (plan.host_threads, plan.context_bytes) == (7, found.hardware.context_bytes + 13)
    assert any("13 B for page tables of host memory" in note and "2% of all is slack" in note for note in plan.notes)
