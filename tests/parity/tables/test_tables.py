"""Tied embeddings updated in two parts: rows that a batch looks up at the end, all others after the last block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

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
from lt_offload.schema.plan import Op, Plan
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
