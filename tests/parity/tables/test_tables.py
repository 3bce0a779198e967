"""Tied embeddings updated in two parts: rows that a batch looks up at the end, all others after the last block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.optim import AdamW
from lt_offload.plan.assembly.ops import TiedTable
from lt_offload.plan.planners.priced import priced
from lt_offload.plan.rows import as_head, table_of
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan
from lt_offload.plan.verify.check import check
from lt_offload.plan.windows import for_one, for_windows, with_sums
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.plan import Op, Plan, PlannerName
from lt_offload.schema.profile import Profile
from tests.support import engines, models
from tests.support.engines import Case, Result, differences, make_optimizer, trained_by
from tests.support.hostile.device import HostileDevice
from tests.support.profiles.fixed_times import with_fixed_times

VOCABULARY = 512
SHAPES = ((5, 24), (5, 24), (2, 9), (5, 24))
"""The first is planned for."""

MAKERS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer]]] = {
    "torch": (torch.float32, lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True)),
    "torch, bfloat16": (torch.bfloat16, lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True)),
    "masters": (torch.bfloat16, lambda groups: AdamW(groups, lr=1e-2)),
    "noise": (torch.bfloat16, lambda groups: AdamW(groups, lr=1e-2, stochastic_rounding=True)),
}


def build(maker: str, family: str = "llama-tied", rows: int = VOCABULARY) -> nn.Module:
    dtype = MAKERS[maker][0]
    return models.build(family, layers=3, dtype=dtype, vocab_size=rows, tie_word_embeddings=True)


def optimizer_of(model: nn.Module, maker: str) -> torch.optim.Optimizer:
    return make_optimizer(model, MAKERS[maker][1])


def batches(model: nn.Module) -> list[dict[str, Any]]:
    made = [models.batch(model, batch_size=b, sequence_length=s, seed=i) for i, (b, s) in enumerate(SHAPES)]
    made[1]["input_ids"][:, 3:9] = 7  # one token several times, in several samples
    return made


@cache
def measured(maker: str, family: str = "llama-tied", parts: int = 1, rows: int = VOCABULARY) -> Profile:
    model = build(maker, family, rows)
    found = profile(
        model,
        batches(model)[0],
        optimizer=optimizer_of(model, maker),
        device="cpu",
        hardware=replace(load_hardware("rtx-3060-12gb"), context_bytes=0),
        run=lambda batch: model(**batch).loss,
        micro_batches=parts,
    )
    return with_fixed_times(found)


@cache
def planned(
    maker: str, part_of_budget: float, family: str = "llama-tied", parts: int = 1, rows: int = VOCABULARY
) -> tuple[Plan, int]:
    """A plan in two parts, with so much of what is between the smallest budget and the largest; and the budget."""
    found = measured(maker, family, parts, rows)
    table = table_of(found)
    assert table is not None
    head = as_head(found, table)
    low = make_plan(head, Settings(planner="stream")).predicted.device_peak_bytes
    high = make_plan(head, Settings()).predicted.device_peak_bytes
    budget = int(low + part_of_budget * (high - low))
    plan = make_plan(head, Settings(memory=budget), table=TiedTable(index=table, profile=found))
    return priced(plan, found), budget


def in_two_parts(case: Case, window: int = 1) -> Plan:
    """A plan for a case with tied embeddings and windows of so many micro-batches, whatever the budget."""
    model = engines.build(case)
    batch = engines.batches(case, model)[0]
    found = profile(
        model,
        batch,
        optimizer=make_optimizer(model, case.optimizer),
        device="cpu",
        hardware=replace(load_hardware("rtx-3060-12gb"), context_bytes=0),
        run=lambda batch: model(**batch).loss,
    )
    found = with_fixed_times(found)
    table = table_of(found)
    assert table is not None
    head = as_head(with_sums(found, window) if window > 1 else found, table)
    low = make_plan(head, for_one(Settings(planner="stream"))).predicted.device_peak_bytes
    settings = Settings(planner="greedy", memory=int(1.1 * low), accumulate=window)
    made = make_plan(head, for_one(settings), table=TiedTable(index=table, profile=found))
    return for_windows(made, found, settings)


def plain(maker: str, family: str = "llama-tied", rows: int = VOCABULARY) -> Result:
    model = build(maker, family, rows)
    optimizer = optimizer_of(model, maker)
    torch.manual_seed(0)
    losses = []
    for batch in batches(model):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Result(losses, model, optimizer)


def trained(
    plan: Plan, budget: int, maker: str, family: str = "llama-tied", mode: str = "lazy", rows: int = VOCABULARY
) -> Result:
    model = build(maker, family, rows)
    device = HostileDevice(budget, mode, check=True)
    result, peak = trained_by(device, plan, model, optimizer_of(model, maker), batches(model))
    assert peak <= budget
    return result


@pytest.mark.parametrize("part_of_budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_table_in_two_parts_has_the_numbers_of_plain_pytorch(maker: str, part_of_budget: float) -> None:
    plan, budget = planned(maker, part_of_budget)
    assert [op.rows for op in plan.ops if op.kind == "update" and op.rows] == ["others", "looked up"]
    assert differences(plain(maker), trained(plan, budget, maker)) == []


@cache
def fetched_again(planner: PlannerName, part_of_budget: float) -> tuple[Plan, Plan, int]:
    """A plan that fetches the table again when it has been updated, that plan in two parts, and the budget."""
    found = measured("torch")
    table = table_of(found)
    assert table is not None
    head = as_head(found, table)
    low = make_plan(head, Settings(planner=planner)).predicted.device_peak_bytes
    high = make_plan(head, Settings()).predicted.device_peak_bytes
    budget = int(low + part_of_budget * max(high - low, 0))
    settings = Settings(memory=budget, planner=planner)
    plan = make_plan(head, settings, table=TiedTable(index=table, profile=found))
    return make_plan(head, settings), priced(plan, found), budget


def fetches(plan: Plan) -> list[tuple[int, set[str | None]]]:
    """Return the steps in which a plan fetches the table, and which of its rows' updates that waits for."""
    made = measured("torch")
    found = [op for op in plan.ops if op.kind == "prefetch" and table_of(made) in plan.tensors(op)]
    updates = {op.id: op.rows for op in plan.ops if op.updates_on_host and table_of(made) in plan.tensors(op)}
    return [(op.step, {updates[other] for other in op.after if other in updates}) for op in found]


@pytest.mark.own_plan("is about plans that fetch the table early")
@pytest.mark.parametrize("planner", ["stream", "l2l"])
@pytest.mark.parametrize("mode", ["lazy", "random"])
def test_a_table_that_a_plan_fetches_again_is_fetched_by_the_next_iteration(planner: PlannerName, mode: str) -> None:
    whole, plan, budget = fetched_again(planner, 0.3)
    ((early, of_whole),) = fetches(whole)
    ((late, of_parts),) = fetches(plan)
    blocks = len(plan.options)
    assert (early >= blocks, of_whole) == (True, {None})
    assert (late < blocks, of_parts) == (True, {"others", "looked up"})
    assert differences(plain("torch"), trained(plan, budget, "torch", mode=mode)) == []


@pytest.mark.parametrize("mode", ["eager", "random"])
@pytest.mark.parametrize("family", ["bloom", "gemma3"])
def test_other_models_and_orders_of_lanes_give_the_same_numbers(family: str, mode: str) -> None:
    plan, budget = planned("torch", 0.3, family)
    assert differences(plain("torch", family), trained(plan, budget, "torch", family, mode)) == []


@pytest.mark.parametrize("maker", ["torch", "noise"])
def test_parts_of_a_batch_add_their_gradients_in_the_order_of_a_plan_for_whole_tensors(maker: str) -> None:
    plan, budget = planned(maker, 0.3, parts=2)
    assert plan.parts == 2
    whole = make_plan(measured(maker, parts=2), Settings(planner="greedy", memory=2 * budget))
    assert not any(op.rows for op in whole.ops)
    assert differences(trained(whole, 2 * budget, maker), trained(plan, budget, maker)) == []


@pytest.mark.parametrize("maker", ["torch", "masters"])
def test_training_goes_on_from_what_was_saved_and_with_other_plans(maker: str) -> None:
    plan, budget = planned(maker, 0.3)
    whole = make_plan(measured(maker), Settings(planner="greedy", memory=2 * budget))
    made = batches(build(maker))
    model = build(maker)
    first, _ = trained_by(HostileDevice(budget, check=True), plan, model, optimizer_of(model, maker), made[:2])
    losses = first.losses
    for batch, found in zip(made[2:], (whole, plan), strict=True):
        model = build(maker)
        optimizer = optimizer_of(model, maker)
        model.load_state_dict(first.model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        first, _ = trained_by(HostileDevice(2 * budget, check=True), found, model, optimizer, [batch])
        losses += first.losses
    assert differences(plain(maker), Result(losses, first.model, first.optimizer)) == []


def test_batches_with_more_tokens_than_planned_find_room() -> None:
    plan, budget = planned("torch", 1.0)
    results = []
    for found in (plan, make_plan(measured("torch"), Settings(planner="greedy", memory=8 * budget))):
        model = build("torch")
        large = [models.batch(model, batch_size=6, sequence_length=24, seed=seed) for seed in range(2)]
        device = HostileDevice(8 * budget, "lazy", check=True)
        results.append(trained_by(device, found, model, optimizer_of(model, "torch"), large)[0])
    assert differences(*results) == []


def test_a_batch_may_have_more_tokens_than_the_table_has_rows() -> None:
    plan, budget = planned("torch", 0.3, rows=models.VOCAB)
    assert differences(plain("torch", rows=models.VOCAB), trained(plan, budget, "torch", rows=models.VOCAB)) == []


def test_a_step_in_the_midst_of_validations_sees_its_own_tokens() -> None:
    plan, budget = planned("torch", 0.3)
    model = build("torch")
    optimizer, device = optimizer_of(model, "torch"), HostileDevice(2 * budget, "lazy", check=True)
    engine, losses = Engine(model, optimizer, plan, device), []
    engine.install()
    torch.manual_seed(0)
    for batch, other in zip(batches(model), reversed(batches(model)), strict=True):
        with torch.no_grad():
            model(**other)
        with engine.iteration():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.detach().clone())
    engine.remove()
    device.close()
    assert differences(plain("torch"), Result(losses, model, optimizer)) == []


def test_a_use_of_other_rows_is_an_error_that_names_the_table_and_the_way_out() -> None:
    plan, budget = planned("torch", 1.0)
    model = build("torch")
    device = HostileDevice(budget, "lazy", check=True)
    table = model.get_input_embeddings()
    plainly, calls = type(table).forward, 0

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        x: torch.Tensor = plainly(self, ids)
        return x + self.weight[-1] if calls == 2 else x

    table.forward = forward.__get__(table)
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight is used in another way.*planner='greedy'"):
        trained_by(device, plan, model, optimizer_of(model, "torch"), batches(model))


def test_squares_of_gradients_are_those_of_both_parts() -> None:
    plan, budget = planned("torch", 0.3)
    norms = []
    for found in (plan, make_plan(measured("torch"), Settings(planner="greedy", memory=2 * budget))):
        model = build("torch")
        optimizer, device = optimizer_of(model, "torch"), HostileDevice(2 * budget, "lazy", check=True)
        engine = Engine(model, optimizer, found, device)
        engine.install()
        with engine.iteration(grad_norm=True):
            model(**batches(model)[0]).loss.backward()
            optimizer.step()
        norms.append(engine.stats.grad_norm)
        engine.remove()
        device.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_planner_takes_two_parts_where_that_is_faster(tmp_path: Path) -> None:
    found = measured("masters")
    hardware = replace(found.hardware, h2d_bytes_per_s=5e7, d2h_bytes_per_s=5e7)
    slow = replace(found, hardware=hardware, optimizer=replace(found.optimizer, host_bytes_per_s=5e7))
    budget = planned("masters", 0.3)[1] * 4 // 5
    plan = make_plan(slow, Settings(memory=budget))
    whole = make_plan(
        replace(slow, tensors=tuple(replace(t, lookup_bytes=0) for t in slow.tensors)), Settings(memory=budget)
    )
    assert any(op.rows for op in plan.ops)
    assert plan.predicted.iteration_s < whole.predicted.iteration_s
    assert check(plan, slow) == []
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


BROKEN: dict[str, Callable[[Op], Op]] = {
    "an update of all rows at once": lambda op: replace(op, rows=None) if op.kind == "update" else op,
    "both parts alike": lambda op: replace(op, rows="others") if op.rows else op,
    "not read directly": lambda op: replace(op, zero_copy=(), bytes=0) if op.kind == "forward" else op,
    "not after the other rows": lambda op: replace(op, after=()) if op.rows == "looked up" else op,
    "a lookup that waits for nothing": lambda op: replace(op, after=()) if op.zero_copy else op,
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_plan_in_two_parts_that_is_broken_is_refused(what: str) -> None:
    plan, _ = planned("torch", 0.3)
    assert check(replace(plan, ops=tuple(map(BROKEN[what], plan.ops))), measured("torch"))
