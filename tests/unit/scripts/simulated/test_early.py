"""Updates that do not wait for the norm, on paper: ``scripts.simulated.early``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.plan import solve
from lt_offload.schema.profile import HardwareProfile, Profile
from scripts.simulated.clipping import tables
from scripts.simulated.early import Early, all_early, aside, best, host_early
from tests.support.samples import make_profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    found = make_profile(layers=4, tensors_per_layer=2)
    hardware: HardwareProfile = replace(found.hardware, device_bytes=10**9, host_memory_bytes_per_s=2e10)
    return replace(found, hardware=hardware)


def test_what_waits_takes_what_the_plan_says(profile: Profile) -> None:
    plan = solve(profile, memory=440_000_000, delayed=True, planner="stream", time_limit=5)
    assert any(op.updates_on_host for op in plan.ops)
    assert host_early(plan, profile, 0.0, 5.0) == Early(plan.predicted.iteration_s, 0)


def test_early_updates_are_hidden_behind_the_backward_and_hold_old_values(profile: Profile) -> None:
    plan = solve(profile, memory=440_000_000, delayed=True, planner="stream", time_limit=5)
    found = host_early(plan, profile, 1.0, 1.0)
    assert found.seconds < plan.predicted.iteration_s
    hosted = [t for t, place in zip(profile.tensors, plan.update_places, strict=True) if place == "host"]
    assert found.ram == sum(tensor.bytes + tensor.state_bytes for tensor in hosted)
    half = host_early(plan, profile, 0.5, 1.0)
    assert 0 < half.ram < found.ram
    assert host_early(plan, profile, 1.0, 3.0).seconds > found.seconds


def test_copying_aside_is_six_accesses_beside_the_seven_of_an_update(profile: Profile) -> None:
    assert aside(profile) == pytest.approx(13 / 7, rel=1e-6)


def test_old_values_of_updates_on_the_device_are_copied_by_the_host_before_they_are_overwritten(
    profile: Profile,
) -> None:
    plan = solve(profile, host_update=False, memory=580_000_000, time_limit=5)
    assert set(plan.update_places) == {"paged"}
    fast, slow = (
        all_early(plan, replace(profile, hardware=replace(profile.hardware, host_memory_bytes_per_s=speed)), 1.0)
        for speed in (1e18, 1e9)
    )
    assert plan.predicted.iteration_s < fast.seconds < slow.seconds, "gradients leave; the copies take time"
    assert slow.ram == sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors)


def test_the_least_ram_within_a_percent_is_chosen() -> None:
    plans = [Early(10.0, 9), Early(10.05, 5), Early(10.2, 1), Early(10.01, 7)]
    assert best(iter(plans)) == Early(10.05, 5)


def test_the_tables_have_a_row_for_each_case_that_costs_something() -> None:
    early = {"a": {"seconds": 2.5, "ram": 3_000_000_000}, "b": {"seconds": 2.0, "ram": 4_000_000_000}}
    case = {"model": "m", "window": 1, "free_s": 2.0, "clipped_s": 3.0, "norm_s": 0.0, "early": early}
    cases = [case, case | {"window": 4, "early": {}}]

    def section(title: str, command: str, results: object, head: list[str], rows: list[list[str]]) -> str:
        return "\n".join(" | ".join(row) for row in [head, *rows])

    first, second = tables(section, [{"figures": {"cases": cases}}]).split("\n\n")
    assert len(first.splitlines()) == 3
    assert second.splitlines() == [
        "model, batch | without clipping | updates wait | a | b",
        "m | 2 s | 3 s | 2.5 s, 3 GB | 2 s, 4 GB",
    ]


def test_what_stays_on_the_device_has_no_old_values_in_ram(profile: Profile) -> None:
    plan = solve(profile, host_update=False, memory=900_000_000, time_limit=5)
    assert set(plan.update_places) == {"device"}
    assert all_early(plan, profile, 1.0) == Early(plan.predicted.iteration_s, 0)
