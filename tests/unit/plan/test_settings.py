"""The settings of planning: declared once, refused where they cannot be; plans leave what an allocator takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from lt_offload import OffmateStrategy, solve
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.plan import check
from lt_offload.plan.iteration.memory import budget_for, computation_bytes, room_within
from lt_offload.plan.settings import Settings
from lt_offload.schema.profile import Profile
from tests.support.profiles.small import small_profile
from tests.support.samples import make_profile

DEFAULTS = {field.name: field.default for field in fields(Settings)}


def defaults(function: Callable[..., Any], *without: str) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in without}


def test_solve_takes_exactly_these() -> None:
    assert defaults(solve, "profile") | {"hosted": False} == DEFAULTS, "planning sets it where processes need that"


def test_the_strategy_takes_these_and_its_own_and_windows_are_the_trainers() -> None:
    own = (
        "batch_size",
        "max_batch_size",
        "micro_batches",
        "tile_tokens",
        "blocks",
        "plan",
        "report_dir",
        "async_checkpoint",
    )
    taken = defaults(OffmateStrategy.__init__, "self", *own)
    windows = {"accumulate": 1, "delayed": False, "hosted": False}
    assert taken | windows == DEFAULTS


def test_what_the_strategy_is_given_arrives() -> None:
    given: dict[str, Any] = {
        "memory": 10**9,
        "host_memory": 10**10,
        "planner": "memferry",
        "host_update": False,
        "activation_offload": False,
        "recompute": False,
        "gradient_reserve": 0.5,
    }
    assert OffmateStrategy(solver_time_limit=7.0, **given).settings == Settings(solver_time_limit=7.0, **given)
    assert OffmateStrategy(chunked_loss=True).settings == Settings(chunked_loss=True)


def test_budgets_are_those_of_the_machine_unless_given() -> None:
    machine = make_profile().hardware
    assert Settings().device_budget(machine) == machine.device_bytes
    assert Settings().host_budget(machine) == machine.host_bytes
    asked = Settings(memory="1GB", host_memory="2GiB")
    assert (asked.device_budget(machine), asked.host_budget(machine)) == (10**9, 2 * 2**30)


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"memory": "ten"}, ConfigError, "memory='ten' is not a size"),
        ({"host_memory": 0}, ConfigError, "host_memory=0 is not a size"),
        ({"planner": "magic"}, UnsupportedError, "planner='magic' does not exist; choose one of auto, offmate"),
        ({"gradient_reserve": -0.1}, ConfigError, "gradient_reserve=-0.1 .* from 0 to 1, or None"),
        ({"chunked_loss": True, "recompute": False}, ConfigError, "chunked_loss=True .* recompute=False .* one of"),
        ({"solver_time_limit": 0}, ConfigError, "solver_time_limit=0 must be a positive number of seconds"),
    ],
)
def test_what_cannot_be(setting: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Settings(**setting)


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
