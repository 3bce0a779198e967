"""What more of each lane would buy: solved again, never worse, and told apart from what is not short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.errors import InfeasibleError
from lt_offload.plan import Settings
from lt_offload.plan import make_plan as plans
from lt_offload.plan.what_if import MORE_MEMORY, MORE_RAM, gains
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.samples import MB, make_plan, make_profile

PROFILE = make_profile(layers=8, tensors_per_layer=2)


def solver(profile: Profile, memory: int, host_memory: int) -> Plan:
    """Plan for more memory than the card has, too."""
    return plans(profile, Settings(memory=memory, host_memory=host_memory, time_limit=5))


@pytest.mark.slow
def test_what_is_short_is_what_pays() -> None:
    slow = replace(PROFILE.hardware, h2d_bytes_per_s=0.4e9, d2h_bytes_per_s=0.4e9)
    profile = replace(PROFILE, hardware=slow)
    plan = solver(profile, 420 * MB, 24_000 * MB)
    said: list[str] = []
    memory, ram, link, update = gains(plan, profile, solver, say=said.append)
    assert [gain.change for gain in (memory, ram, link, update)] == [
        line.removeprefix("planning with ") for line in said
    ]
    assert memory.change == "1 GB more device memory"
    assert memory.iteration_s == pytest.approx(
        solver(profile, 420 * MB + MORE_MEMORY, 24_000 * MB).predicted.iteration_s
    )
    assert memory.iteration_s < 0.9 * plan.predicted.iteration_s
    assert link.iteration_s < plan.predicted.iteration_s
    assert ram.iteration_s == plan.predicted.iteration_s
    assert ram.note.endswith("of 24 GB are needed")
    assert max(gain.iteration_s for gain in (memory, ram, link, update)) <= plan.predicted.iteration_s
    assert all(gain.lower_bound_s <= gain.iteration_s for gain in (memory, ram, link, update))


def test_ram_is_solved_for_where_it_is_short() -> None:
    asked: list[tuple[int, int]] = []

    def remember(profile: Profile, memory: int, host_memory: int) -> Plan:
        asked.append((memory, host_memory))
        faster = replace(plan.predicted, iteration_s=1.8)
        return replace(plan, predicted=faster)

    plan = replace(make_plan(PROFILE), host_budget_bytes=2_400 * MB)  # of which it takes 2.31 GB
    found = gains(plan, PROFILE, remember)
    assert asked[1] == (plan.budget_bytes, plan.host_budget_bytes + MORE_RAM)
    assert found[1].iteration_s == 1.8
    assert found[1].note == ""


def test_no_change_makes_it_worse_even_if_the_planner_does() -> None:
    plan = make_plan(PROFILE)
    worse = replace(plan, predicted=replace(plan.predicted, iteration_s=99.0, lower_bound_s=98.0))
    assert {gain.iteration_s for gain in gains(plan, PROFILE, lambda *_: worse)} == {plan.predicted.iteration_s}

    def fails(*_: object) -> Plan:
        raise InfeasibleError("not solved")

    found = gains(plan, PROFILE, fails)
    assert {gain.iteration_s for gain in found} == {plan.predicted.iteration_s}
    assert found[0].note == "no other plan was found in time"
