"""The settings of planning: what the public functions take is what is declared once, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from lt_offload import OffmateStrategy, solve
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.plan.settings import Settings
from tests.support.samples import make_profile

DEFAULTS = {field.name: field.default for field in fields(Settings)}


def defaults(function: Callable[..., Any], *without: str) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in without}


def test_solve_takes_exactly_these() -> None:
    assert defaults(solve, "profile") | {"hosted": False} == DEFAULTS, "planning sets it where processes need that"


def test_the_strategy_takes_these_and_its_own_and_windows_are_the_trainers() -> None:
    own = ("batch_size", "micro_batches", "blocks", "plan", "report_dir", "async_checkpoint")
    taken = defaults(OffmateStrategy.__init__, "self", *own)
    windows = {"accumulate": 1, "delayed": False, "hosted": False}
    assert {name.removeprefix("solver_"): value for name, value in taken.items()} | windows == DEFAULTS


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
    assert OffmateStrategy(solver_time_limit=7.0, **given).settings == Settings(time_limit=7.0, **given)
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
        ({"time_limit": 0}, ConfigError, "solver_time_limit=0 must be a positive number of seconds"),
    ],
)
def test_what_cannot_be(setting: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Settings(**setting)
