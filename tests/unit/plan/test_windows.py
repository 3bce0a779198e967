"""Plans for windows of micro-batches: sound for every model, priced by the window, told in their words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan import Choices, Plan, check, choose_batch, simulate, solve
from lt_offload.plan.batch.profiles import scaled
from lt_offload.plan.planners.offmate import program
from lt_offload.plan.planners.offmate.program import lower_bound
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import least_s, make_plan, offmate_config
from lt_offload.report.plan_page import write_plan_report
from lt_offload.schema.explain import brief
from lt_offload.schema.plan import Pass, PlannerName
from lt_offload.schema.profile import Contention, Profile
from tests import sampling
from tests.support.profiles.fixtures import llama7b_b4
from tests.support.profiles.program_rules import KINDS, random_profile
from tests.support.profiles.small import small_profile, with_op

MODES: tuple[dict[str, Any], ...] = (
    {"accumulate": 2},
    {"accumulate": 5},
    {"delayed": True},
    {"accumulate": 3, "delayed": True},
)


def budgets(profile: Profile, **settings: Any) -> list[int]:
    """Budgets near the smallest, in the middle, and with room for everything."""
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, memory=1, **settings)
    least = caught.value.needed_bytes
    assert least is not None
    everything = sum(3 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    most = least + everything + sum(block.option("keep").saved_bytes for block in profile.blocks)
    return [int(1.1 * least), (least + most) // 2, most]


@pytest.mark.parametrize(("seed", "mode"), sampling.grid(range(5), MODES, count=3))
def test_plans_keep_their_budgets_and_say_what_the_simulator_says(seed: int, mode: dict[str, Any]) -> None:
    profile = random_profile(np.random.default_rng(seed), KINDS[seed])
    profile = replace(
        profile,
        contention=Contention(compute=0.1, h2d=0.5, d2h=0.5, host=0.9) if seed % 2 else Contention(),
    )
    for memory in budgets(profile, **mode):
        plan = solve(profile, memory=memory, solver_time_limit=1000, **mode)
        assert check(plan, profile) == []
        trace = simulate(plan, profile)
        promise = plan.predicted
        assert promise.iteration_s == trace.iteration_time
        least = least_s(profile, Settings(memory=memory, solver_time_limit=1000, **mode))
        assert 0 < least <= promise.lower_bound_s * (1 + 1e-9), "a bound, and at least this one"
        assert promise.lower_bound_s <= promise.iteration_s
        assert promise.device_peak_bytes == trace.device_peak <= plan.budget_bytes
        assert promise.host_peak_bytes == trace.host_peak <= plan.host_budget_bytes
        assert 0 < promise.lower_bound_s <= promise.iteration_s
        assert (plan.window, plan.delayed) == (mode.get("accumulate", 1), mode.get("delayed", False))


@pytest.mark.parametrize(("seed", "mode"), sampling.grid(range(5), MODES, count=4))
def test_no_plan_beats_the_bound_where_ram_is_short(seed: int, mode: dict[str, Any]) -> None:
    profile = random_profile(np.random.default_rng(seed + 20), KINDS[seed])
    memory = budgets(profile, **mode)[1]
    ram = solve(profile, memory=memory, solver_time_limit=1000, **mode).predicted.host_peak_bytes
    for part in (1.0, 0.9):
        try:
            plan = solve(profile, memory=memory, host_memory=int(part * ram), solver_time_limit=1000, **mode)
        except InfeasibleError:
            continue
        needed = plan.predicted.host_peak_bytes
        bounds = [least_s(profile, Settings(memory=memory, host_memory=b, **mode)) for b in (needed, 4 * needed)]
        assert bounds[1] <= bounds[0] * (1 + 1e-6)
        assert bounds[0] <= plan.predicted.iteration_s * (1 + 1e-6)


def test_a_bound_that_was_not_found_in_time_is_not_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = llama7b_b4(4)
    assert solve(profile, memory="8GB", accumulate=2, solver_time_limit=1000).predicted.proved
    monkeypatch.setattr(program, "run", lambda *_, **__: "stopped")
    plan = solve(profile, memory="8GB", accumulate=2)
    assert check(plan, profile) == []
    assert not plan.predicted.proved
    assert plan.predicted.lower_bound_s < plan.predicted.iteration_s


@pytest.mark.parametrize("seed", [29, 215])
def test_the_bound_of_a_model_that_is_frozen_at_first_is_one_for_copies_at_any_time(seed: int) -> None:
    """Its first blocks have no backward: steps near their uses may be empty, and copies are done elsewhere."""
    profile = random_profile(np.random.default_rng(seed), "frozen start")
    assert not all(block.has_backward for block in profile.blocks)
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, memory=1)
    assert caught.value.needed_bytes is not None
    settings = Settings(memory=int(1.02 * caught.value.needed_bytes))
    bounds = []
    for reach in (6, 2 * len(profile.blocks)):
        config = offmate_config(profile, settings, reach=reach)
        loose = replace(config, phi=0.0, lag=0, lookahead=0, optimistic=True)
        bounds.append(lower_bound(profile, loose))
    assert bounds[0] > 1.01 * bounds[1]
    assert make_plan(profile, settings).predicted.lower_bound_s <= bounds[1] * (1 + 1e-6)


def test_what_an_update_has_used_up_does_not_travel() -> None:
    """Sums are copied to the host where more is added to them later, states where an update has changed them."""
    plan = solve(small_profile(), memory=8_000, accumulate=3, host_update=False)
    copied = {which: {op.payload for op in plan.program(which) if op.kind == "offload"} for which in plan.passes}
    assert "sum" in copied["accumulating"] - copied["updating"]
    assert "state" in copied["updating"] - copied["accumulating"]


def test_no_update_that_waits_begins_before_the_last_gradient_is_there() -> None:
    """The norm is that of all of them."""
    profile = small_profile()
    for settings in ({"planner": "l2l"}, {"host_update": False}, {"accumulate": 3}):
        plan = solve(profile, memory=8_000, delayed=True, **settings)
        spans = {span.op: span for span in simulate(plan, profile).spans}
        gradients = [op for op in plan.ops if plan.begins_sums(op) or op.kind == "accumulate"]
        last = max(spans[op.id].end for op in gradients if op.id in spans)
        assert min(spans[op.id].start for op in plan.ops if op.kind == "update") >= last * (1 - 1e-9)


def test_the_simulated_window_is_that_of_its_passes() -> None:
    """A window of many passes is as long as one of few, and as many passes more as there are."""
    plan = solve(small_profile(), memory=8_000, accumulate=3)
    times = [simulate(replace(plan, window=n), small_profile()).iteration_time for n in (3, 4, 5, 9)]
    alone = times[1] - times[0]
    assert alone > 0
    assert times[2] - times[1] == pytest.approx(alone)
    assert times[3] == pytest.approx(times[0] + 6 * alone)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_plan_is_saved_told_and_drawn(mode: dict[str, Any], tmp_path: Path) -> None:
    profile = small_profile()
    plan = solve(profile, memory=8_000, **mode)
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    text = plan.explain()
    if plan.window > 1:
        assert f"a window of {plan.window} micro-batches takes" in text
        assert f"{plan.window} micro-batches of" in brief(plan)
        assert f"A window of {plan.window} micro-batches takes" in brief(plan).replace("\n", " ")
        assert f"to the host per window of {plan.window} micro-batches" in text
    assert ("so that they can be clipped" in text) is plan.delayed
    page = write_plan_report(tmp_path / "plan.html", plan, profile, simulate(plan, profile)).read_text()
    assert "sums of gradients" in page
    assert "gradients added up" in page


def broken(plan: Plan, which: Any, **changes: Any) -> Plan:
    """Return ``plan`` with the first op that ``which`` accepts changed."""
    return with_op(plan, next(op for op in plan.ops if which(op)), **changes)


def elsewhere(plan: Plan, which: Any, *passes: Pass) -> Plan:
    """Return ``plan`` with the first op that ``which`` accepts carried out in these kinds of passes."""
    return broken(plan, which, passes=passes)


def test_broken_windows_are_refused() -> None:
    profile = small_profile()
    plan = solve(profile, memory=7_800, accumulate=3, host_update=False)
    assert check(plan, profile) == []
    host = solve(profile, memory=8_000, accumulate=3, planner="l2l")
    clipped = solve(profile, memory=8_000, delayed=True)
    for case in (
        elsewhere(plan, lambda op: op.kind == "accumulate", "accumulating", "updating"),
        elsewhere(plan, lambda op: op.kind == "accumulate", "updating"),
        elsewhere(plan, lambda op: op.kind == "accumulate"),
        elsewhere(plan, lambda op: op.kind == "update", "accumulating"),
        elsewhere(plan, lambda op: op.kind == "update", "accumulating", "updating"),
        elsewhere(plan, lambda op: op.kind == "forward", "updating"),
        elsewhere(plan, lambda op: op.payload == "sum" and op.kind == "prefetch", "updating"),
        replace(plan, ops=plan.ops[::-1]),
        elsewhere(plan, lambda op: op.payload == "weight"),
        elsewhere(plan, lambda op: op.payload == "weight", *plan.passes, "settling"),
        broken(host, lambda op: op.kind == "accumulate", after=()),
        broken(host, lambda op: op.kind == "update", after=()),
        elsewhere(host, lambda op: op.payload == "grad", "updating"),
        elsewhere(host, host.begins_sums, "beginning", "accumulating"),
        elsewhere(host, host.begins_sums),
        elsewhere(host, lambda op: op.kind == "accumulate", "beginning", "accumulating"),
        elsewhere(host, lambda op: op.sends_gradients and not host.begins_sums(op), "beginning", "updating"),
        broken(host, host.begins_sums, after=()),
        broken(clipped, lambda op: op.kind == "update", after=()),
        elsewhere(clipped, lambda op: op.kind == "backward", "accumulating", "settling"),
        elsewhere(clipped, lambda op: op.kind == "update", "accumulating"),
    ):
        assert check(case, profile) != [], case


def test_micro_batches_are_chosen_for_a_window_and_split_where_the_samples_are_given() -> None:
    made: list[int] = []

    def at(size: int, parts: int) -> Profile:
        made.append(size)
        return scaled(small_profile(), size, None)

    settings = Settings(memory=60_000, solver_time_limit=1)
    _, plan = choose_batch(at, settings, Choices(most=8, accumulate=4))
    assert plan.window == 4
    assert plan.batch_size <= 2
    made.clear()
    profile, plan = choose_batch(at, settings, Choices(most=100, samples=12))
    assert 12 % plan.batch_size == 0
    assert set(made) <= {1, 2, 3, 4, 6, 12}
    assert plan.window == 12 // plan.batch_size
    assert check(plan, profile) == []


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_windows_that_are_no_number_of_micro_batches(count: Any) -> None:
    with pytest.raises(ConfigError, match="accumulate=.* must be at least 1"):
        solve(small_profile(), memory=8_000, accumulate=count)


def test_no_room_says_what_would_do() -> None:
    with pytest.raises((InfeasibleError, UnsupportedError)) as caught:
        solve(small_profile(), memory=1, accumulate=2)
    needed = caught.value.needed_bytes  # type: ignore[union-attr]
    assert check(solve(small_profile(), memory=needed, accumulate=2), small_profile()) == []


@pytest.mark.parametrize("planner", ["stream", "greedy"])
@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"delayed": True}], ids=str)
def test_states_and_sums_of_large_blocks_travel_apart(planner: PlannerName, settings: dict[str, Any]) -> None:
    """States of a block leave in several copies, and stand beside all its sums: whoever comes next waits for all."""
    profile = llama7b_b4(8)
    plan = solve(profile, memory=9 * 10**9, planner=planner, solver_time_limit=1000, **settings)
    assert check(plan, profile) == []


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"delayed": True}], ids=str)
def test_windows_of_models_in_whose_blocks_nothing_is_trained(settings: dict[str, Any]) -> None:
    profile = small_profile(4, frozen=(0, 1, 2, 3), no_backward=4)
    plan = solve(profile, memory="1GB", solver_time_limit=1000, **settings)
    assert check(plan, profile) == []
    assert plan.adds_up
    assert plan.accumulate == settings.get("accumulate", 1)
