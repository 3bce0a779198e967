"""Plans made by the planner, carried out in a plain loop on a device with a hard budget."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import lt_offload
from lt_offload.errors import OverBudget
from lt_offload.plan.assembly.ops import TiedTable
from lt_offload.plan.planners.priced import priced
from lt_offload.plan.rows import as_head, table_of
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan
from lt_offload.profiling import measure
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.plan import Plan, PlannerName
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.support import models
from tests.support.engines import Result, carried_out, differences, make_optimizer
from tests.support.hostile.device import HostileDevice
from tests.support.profiles import budgets
from tests.support.profiles.fixed_times import with_fixed_times
from tests.support.user_nets import ordinary

LAYERS = 6


def fresh(family: str = "llama") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = models.build(family, layers=LAYERS, dropout=0.1)
    return model, make_optimizer(model, "adamw-fused")


@functools.cache
def trained(family: str) -> Result:
    model, optimizer = fresh(family)
    torch.manual_seed(1)
    return Result(ordinary(model, optimizer, [profiled(family)[1]] * 3), model, optimizer)


@functools.cache
def profiled(family: str) -> tuple[Profile, dict[str, torch.Tensor]]:
    model, optimizer = fresh(family)
    batch = models.batch(model)
    return lt_offload.profile(model, batch, optimizer=optimizer), batch


def run(plan: Plan, family: str) -> tuple[Result, int]:
    """Return what has become of the model, and the measured peak."""
    model, optimizer = fresh(family)
    losses = []
    with carried_out(model, optimizer, plan) as engine:
        torch.manual_seed(1)
        for _ in range(3):
            with engine.iteration():
                out = model(**profiled(family)[1])  # holds the logits until the next call, as the profile supposes
                out.loss.backward()
                optimizer.step()
            losses.append(out.loss.detach().clone())
        return Result(losses, model, optimizer), engine.stats.device_peak_bytes


@functools.cache
def floor(family: str) -> int:
    """The planner's own smallest budget."""
    return budgets.least(profiled(family)[0])


SHARES = {"smallest": 0.0, "tight": 0.3, "ample": 2.0}


@pytest.mark.parametrize(("family", "share"), sampling.grid([*models.FAMILIES, "gemma3"], SHARES, count=9))
def test_exact_within_a_hard_budget(family: str, share: str) -> None:
    """At the planner's floor, somewhat above it, and where everything fits; the plan says how much it will take."""
    profile, smallest = profiled(family)[0], floor(family)
    state = sum(t.bytes * 2 + t.state_bytes for t in profile.tensors)
    plan = lt_offload.solve(profile, memory=int(smallest + SHARES[share] * max(state - smallest, 0)))
    result, peak = run(plan, family)
    assert differences(trained(family), result) == []
    assert peak <= plan.budget_bytes
    assert 0.95 * plan.predicted.device_peak_bytes <= peak <= plan.predicted.device_peak_bytes


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_exact_where_gradients_take_turns_in_little_ram(family: str) -> None:
    """Room for those of one block: every copy waits for an update, and the device runs updates as late as it can."""
    profile = profiled(family)[0]
    ample = lt_offload.solve(profile, planner="l2l")
    copies = [group.bytes for group in ample.groups if group.host_offset is not None]
    ram = ample.predicted.host_peak_bytes - ample.gradient_bytes + max(copies)
    plan = lt_offload.solve(profile, planner="l2l", host_memory=ram)
    assert plan.gradient_bytes == max(copies) < sum(copies)
    assert differences(trained(family), run(plan, family)[0]) == []


@functools.cache
def with_made_up_times(family: str) -> tuple[Profile, int]:
    """Return a profile, and the planner's own smallest budget for it."""
    model, optimizer = fresh(family)
    hardware = replace(load_hardware("rtx-3060-12gb"), context_bytes=0)
    found = measure.profile(model, models.batch(model), optimizer=optimizer, device="cpu", hardware=hardware)
    found = with_fixed_times(found)
    return found, budgets.least(found)


SMALLEST: dict[str, tuple[str, PlannerName, bool]] = {
    "llama, stream": ("llama", "stream", False),
    "llama, memferry": ("llama", "memferry", False),
    "tied, stream": ("llama-tied", "stream", False),
    "tied, memferry": ("llama-tied", "memferry", False),
    "tied by rows, stream": ("llama-tied", "stream", True),
    "tied by rows, memferry": ("llama-tied", "memferry", True),
    "tied by rows, greedy": ("llama-tied", "greedy", True),
}
"""Who has a plan at the smallest budget, each of which may be the fastest: family, planner, and whether by rows."""


@pytest.mark.parametrize("case", SMALLEST)
def test_the_smallest_budget_is_what_the_planner_says(case: str) -> None:
    """Bisect the budget at which the smallest plan still runs."""
    family, planner, by_rows = SMALLEST[case]
    profile, smallest = with_made_up_times(family)
    if by_rows:
        table = table_of(profile)
        assert table is not None
        settings = Settings(memory=smallest, planner=planner)
        plan = priced(
            make_plan(as_head(profile, table), settings, table=TiedTable(index=table, profile=profile)), profile
        )
    else:
        plan = lt_offload.solve(profile, memory=smallest, planner=planner)
    batch = profiled(family)[1]
    low, high = 1, plan.budget_bytes
    while high - low > high // 200:
        middle = (low + high) // 2
        try:
            model, optimizer = fresh(family)
            device = HostileDevice(middle, mode="lazy")
            with carried_out(model, optimizer, plan, device) as engine, engine.iteration():
                out = model(**batch)  # holds the logits as well, as the profile supposes
                out.loss.backward()
            high = middle
        except OverBudget:
            low = middle
    print(f"runs within {high}, planned for {plan.budget_bytes}, predicted {plan.predicted.device_peak_bytes}")
    assert 0.995 * high <= plan.predicted.device_peak_bytes <= 1.01 * high


def test_a_device_that_cannot_hold_the_plan_is_the_error_that_is_shown() -> None:
    profile, batch = profiled("llama")
    plan = lt_offload.solve(profile, memory="700kB")
    model, optimizer = fresh("llama")
    small = replace(plan, budget_bytes=plan.arena_bytes - 1)
    with (
        pytest.raises(OverBudget, match="exceeds the budget"),
        lt_offload.offloaded(model, optimizer, batch, plan=small, accelerator="cpu"),
    ):
        pass
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
