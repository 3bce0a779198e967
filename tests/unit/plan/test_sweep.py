"""Sweeps and what more of each lane would buy: points that are asked, planned and told."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan import Settings, solve
from lt_offload.plan import make_plan as plans
from lt_offload.plan.sweep import Axis, SweepPoint, parse_sweep, run_sweep, save_sweep
from lt_offload.plan.what_if import MORE_MEMORY, MORE_RAM, gains
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import parse_bytes
from tests.support.samples import MB, make_plan, make_profile

GB = 10**9
PLAN = make_plan(make_profile(layers=4, tensors_per_layer=2))


def taking(seconds: float) -> Callable[[], Plan]:
    return lambda: replace(PLAN, predicted=replace(PLAN.predicted, iteration_s=seconds, no_offload_s=2.0))


def failing(message: str, needed: int | None = None, *, ram: int | None = None) -> Callable[[], Plan]:
    def fail() -> Plan:
        raise InfeasibleError(message, needed_bytes=needed, needed_host_bytes=ram)

    return fail


def sweep(
    *solves: Callable[[], Plan], axis: Axis = "memory", say: Callable[[str], None] = lambda _: None
) -> tuple[list[SweepPoint], str]:
    points = [
        SweepPoint(
            hardware=f"card{at}" if axis == "hardware" else "card",
            memory_bytes=at * GB,
            host_memory_bytes=at * 64 * GB,
            devices=at if axis == "devices" else 1,
        )
        for at, _ in enumerate(solves, start=1)
    ]
    return run_sweep(axis, list(zip(points, solves, strict=True)), say)


def seconds(points: list[SweepPoint]) -> list[float | None]:
    return [point.plan and point.plan.predicted.iteration_s for point in points]


@pytest.mark.parametrize(
    ("text", "axis", "gigabytes"),
    [
        ("memory=6GB:24GB", "memory", range(6, 25, 2)),
        ("memory=6GB:24GB:6GB", "memory", [6, 12, 18, 24]),
        ("memory=4GB:5GB:0.5GB", "memory", [4, 4.5, 5]),
        ("memory=24GB,8GB, 8GB", "memory", [8, 24]),
        ("devices=1:8", "devices", [card / GB for card in range(1, 9)]),
        ("devices=1:3:2", "devices", [1 / GB, 3 / GB]),
        ("devices=4", "devices", [4 / GB]),
        ("nodes=1:64", "nodes", [2**power / GB for power in range(7)]),
        ("host-memory=32GB:128GB", "host_memory", range(32, 129, 10)),
        ("memory=1GB:2GB", "memory", [1 + tenth / 10 for tenth in range(11)]),
    ],
)
def test_sizes(text: str, axis: str, gigabytes: list[float]) -> None:
    wanted = parse_sweep(text)
    assert wanted.axis == axis
    assert list(wanted.sizes) == [round(size * GB) for size in gigabytes]


def test_machines_keep_their_changes() -> None:
    wanted = parse_sweep("hardware=rtx-3060, rtx-3090,host=ddr4-64gb,link=6GB,h200")
    assert wanted.names == ("rtx-3060", "rtx-3090,host=ddr4-64gb,link=6GB", "h200")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6GB:24GB", "write memory=6GB:24GB$"),
        ("mem=6GB:24GB", "write memory=6GB:24GB$"),
        ("memory", "write memory=6GB:24GB:2GB"),
        ("memory=", "write memory=6GB:24GB:2GB"),
        ("ram=32GB:64GB", "write host_memory=32GB:128GB"),
        ("gpu=rtx-3060", "write hardware=rtx-3060,rtx-3090"),
        ("batch=1:8", "write one of memory=6GB:24GB:2GB, host_memory=32GB:128GB, hardware="),
        ("memory=24GB:6GB", "is not a range; write memory=6GB:24GB:2GB"),
        ("memory=6GB", "is not a range; write memory="),
        ("memory=1GB:2GB:3GB:4GB", "is not a range"),
        ("memory=6GB:lots", "sweep: memory='lots' is not a size"),
        ("memory=1GB:24GB:1MB", "23001 points, at most 40 are planned; write memory=1GB:24GB:"),
        ("hardware=rtx-3060,,h200", "has an empty name"),
        ("nodes=" + ",".join(map(str, range(1, 99))), "has 98 points, at most 40 are planned; leave some out"),
        ("devices=1:99999999999999999999", "has 67 points"),
    ],
)
def test_mistakes_name_the_nearest_form(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sweep(text)


def test_points_are_planned_in_order_and_progress_is_told() -> None:
    said: list[str] = []
    points, answer = sweep(failing("too small", 1_500 * MB), taking(4.0), taking(2.5), say=said.append)
    assert said == [
        "1 of 3: planning for 1 GB", "2 of 3: planning for 2 GB", "3 of 3: planning for 3 GB"
    ]  # fmt: skip
    assert seconds(points) == [None, 4.0, 2.5]
    assert points[0].reason == "needs memory=1500MB"
    assert points[1].tokens_per_s == PLAN.batch_size * PLAN.sequence_length / 4.0
    assert answer == "1.5 GB is the least that works. From 3 GB on, more is worth less than 5 %."


def test_more_memory_never_hurts() -> None:
    points, _ = sweep(taking(3.0), taking(3.5), failing("not solved in time"), taking(2.0))
    assert seconds(points) == [3.0, 3.0, 3.0, 2.0]
    assert [point.memory_bytes for point in points] == [GB, 2 * GB, 3 * GB, 4 * GB]
    cards, answer = sweep(taking(3.0), taking(3.5), axis="hardware")
    assert seconds(cards) == [3.0, 3.5]
    assert answer == "card1 is the fastest: 341 tokens per second."
    _, answer = sweep(taking(3.0), taking(2.0), axis="devices")
    assert answer == "2 cards are 1.50 times as fast as one."


def test_nothing_fits() -> None:
    _, answer = sweep(failing("x", 9 * GB), failing("x", 9 * GB))
    assert answer == "Nothing in this range is enough. The smallest that does is 9 GB."
    short, _ = sweep(failing("host_memory=1 GB is too small", ram=70 * GB), axis="host_memory")
    assert short[0].reason == "needs host_memory=70GB"


def test_rows_for_people_and_for_programs(tmp_path: Path) -> None:
    points, _ = sweep(failing("x", 1_500 * MB), taking(4.0), taking(0.0025))
    assert points[0].row("memory") == ("1 GB", "", "", "", "", "", "needs memory=1500MB")
    assert points[1].row("memory")[:4] == ("2 GB", "4 s", "256", "2.00x")
    assert points[2].row("memory")[2] == "409,600"
    saved = json.loads(save_sweep(tmp_path / "new" / "sweep.json", points).read_text())
    assert saved == [point.figures() for point in points]
    with save_sweep(tmp_path / "sweep.csv", points).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["memory_bytes"] for row in rows] == ["1000000000", "2000000000", "3000000000"]
    assert [row["iteration_s"] for row in rows] == ["", "4.0", "0.0025"]
    assert rows[0]["reason"] == "needs memory=1500MB"


def test_real_plans_get_faster_with_memory_and_the_smallest_budget_works() -> None:
    profile = make_profile(layers=6, tensors_per_layer=2)
    profile = replace(profile, hardware=replace(profile.hardware, device_bytes=2_000 * MB))
    sizes = [100 * MB, 350 * MB, 450 * MB, 2_000 * MB]

    def at(size: int) -> Plan:
        return solve(profile, memory=size, solver_time_limit=1000)

    points = [SweepPoint(hardware="card", memory_bytes=size, host_memory_bytes=10 * GB) for size in sizes]
    planned_points, answer = run_sweep("memory", [(p, partial(at, p.memory_bytes)) for p in points], lambda _: None)
    times = seconds(planned_points)
    assert times[0] is None
    smallest = parse_bytes(planned_points[0].reason.removeprefix("needs memory="))
    assert sizes[0] < smallest
    assert at(smallest).predicted.device_peak_bytes <= smallest
    assert "is the least that works." in answer
    planned = [seconds for seconds in times if seconds is not None]
    assert len(planned) >= 2
    assert planned == sorted(planned, reverse=True)


PROFILE = make_profile(layers=8, tensors_per_layer=2)


def solver(profile: Profile, memory: int, host_memory: int) -> Plan:
    """Plan for more memory than the card has, too."""
    return plans(profile, Settings(memory=memory, host_memory=host_memory, solver_time_limit=1000))


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
