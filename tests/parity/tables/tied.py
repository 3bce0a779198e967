"""Models with tied embeddings, and plans that update their tables in two parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from lt_offload.optim import AdamW
from lt_offload.plan.assembly.ops import TiedTable
from lt_offload.plan.rows import as_head, table_of
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan
from lt_offload.plan.windows import for_one, for_windows, with_sums
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.plan import Plan, PlannerName
from lt_offload.schema.profile import Profile
from tests.support import engines, models
from tests.support.engines import Case, make_optimizer
from tests.support.profiles.fixed_times import with_fixed_times

VOCABULARY = 512
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


def profile_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], parts: int = 1) -> Profile:
    hardware = replace(load_hardware("rtx-3060-12gb"), context_bytes=0)
    found = profile(
        model,
        batch,
        optimizer=optimizer,
        device="cpu",
        hardware=hardware,
        run=lambda batch: model(**batch).loss,
        micro_batches=parts,
    )
    return with_fixed_times(found)


@cache
def measured(maker: str, family: str = "llama-tied", parts: int = 1, rows: int = VOCABULARY) -> Profile:
    model = build(maker, family, rows)
    batch = models.batch(model, batch_size=5, sequence_length=24)
    return profile_of(model, optimizer_of(model, maker), batch, parts)


@cache
def planned(
    maker: str,
    part_of_budget: float,
    family: str = "llama-tied",
    parts: int = 1,
    rows: int = VOCABULARY,
    window: int = 3,
    delayed: bool = False,
    planner: PlannerName = "auto",
) -> tuple[Plan, int]:
    """A plan in two parts, with so much of what is between the smallest budget and the largest; and the budget."""
    found = measured(maker, family, parts, rows)
    low, high = (least(found, window, name, delayed=delayed) for name in ("stream", "auto"))
    budget = int(low + part_of_budget * (high - low))
    return planned_in(found, Settings(memory=budget, planner=planner, accumulate=window, delayed=delayed)), budget


def in_two_parts(case: Case, window: int = 1) -> Plan:
    """A plan for a case with tied embeddings and windows of so many micro-batches, whatever the budget."""
    model = engines.build(case)
    found = profile_of(model, make_optimizer(model, case.optimizer), engines.batches(case, model)[0])
    memory = int(1.1 * least(found, window, "stream"))
    return planned_in(found, Settings(planner="greedy", memory=memory, accumulate=window))


def least(found: Profile, window: int, planner: PlannerName, *, delayed: bool = False) -> int:
    """The memory of a plan of ``planner`` for the table as a part of the head."""
    head, _ = parted(found, window, delayed=delayed)
    return make_plan(head, for_one(Settings(planner=planner))).predicted.device_peak_bytes


def planned_in(found: Profile, settings: Settings) -> Plan:
    head, table = parted(found, settings.accumulate, delayed=settings.delayed)
    return for_windows(make_plan(head, for_one(settings), table=table), found, settings)


def parted(found: Profile, window: int, *, delayed: bool = False) -> tuple[Profile, TiedTable]:
    table = table_of(found)
    assert table is not None
    return as_head(with_sums(found, window) if window > 1 or delayed else found, table), TiedTable(
        index=table, profile=found
    )
