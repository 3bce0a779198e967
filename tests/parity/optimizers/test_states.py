"""Moments in eight bits and in bfloat16: the numbers of plain PyTorch by the same optimizer, whatever the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lt_offload import AdamW
from lt_offload.model.blocks import find_blocks
from lt_offload.plan import solve
from tests import sampling
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import engines, models, plans
from tests.support.engines import Case, Result, changed, differences, installed, offloaded, plain

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32, 8 bits": {"state_dtype": "8bit"},
    "masters, 8 bits": {"state_dtype": "8bit", "dtype": "bfloat16"},
    "noise, 8 bits": {"state_dtype": "8bit", "dtype": "bfloat16", "stochastic_rounding": True},
    "fp32, bfloat16": {"state_dtype": "bfloat16"},
    "noise, bfloat16": {"state_dtype": "bfloat16", "dtype": "bfloat16", "stochastic_rounding": True},
}
PLACES = [("host",), ("device",), ("paged",), ("device", "paged", "host")]


def dtype_and_factory(name: str) -> tuple[str, engines.Factory]:
    """Tensors of the small models have eight bits, too, but for the smallest."""
    settings = {"dtype": "float32", "min_8bit_size": 300, "lr": 1e-3} | SETTINGS[name]
    dtype = settings.pop("dtype")
    return dtype, lambda groups: AdamW(groups, **settings)


def dtypes_of(optimizer: Optimizer) -> set[torch.dtype]:
    return {state["exp_avg"].dtype for state in optimizer.state.values()}


@pytest.mark.parametrize(("name", "places"), sampling.grid(list(SETTINGS), PLACES))
def test_equal_in_every_place(name: str, places: tuple[str, ...]) -> None:
    dtype, make = dtype_and_factory(name)
    case = Case(places=places, dtype=dtype, optimizer=make, options=("keep", "recompute"))
    actual = offloaded(case)
    assert differences(plain(case), actual) == []
    assert changed(case, actual)
    few = {torch.uint8, torch.float32} if "8" in name.split(", ")[1] else {torch.bfloat16}
    assert dtypes_of(actual.optimizer) == few


@pytest.mark.parametrize("family", ["llama-tied", "bloom"])
def test_tied_weights_and_adapters(family: str) -> None:
    _, make = dtype_and_factory("fp32, 8 bits")
    for lora in (False, True):
        case = Case(family=family, optimizer=make, lora=lora, places=("paged", "host", "device"))
        actual = offloaded(case)
        assert differences(plain(case), actual) == []
        assert changed(case, actual)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.some(list(SETTINGS), 2))
@pytest.mark.parametrize("clip", [{"clip_norm": 0.2}, {"clip_value": 0.01}, {}], ids=["norm", "value", "none"])
def test_equal_at_three_budgets(name: str, clip: dict[str, float]) -> None:
    """With accumulation, and clipped, where updates wait for the norm."""
    dtype, make = dtype_and_factory(name)
    start = models.build(layers=2, dtype=getattr(torch, dtype))
    training = Training(start=start, windows=[[(2, 12)], [(1, 9), (2, 7)], [(2, 7)]], optimizer=make, **clip)  # type: ignore[arg-type]
    profile, expected = training.profile(), training.plainly()
    delayed = "clip_norm" in clip
    for memory in budgets(profile, accumulate=2, delayed=delayed):
        require_equal(training, solve(profile, memory=memory, accumulate=2, delayed=delayed), expected)


def averaged(model: nn.Module, optimizer: Optimizer) -> tuple[list[torch.Tensor], nn.Module]:
    """Train by a schedule, and keep an exponential average of the weights."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    schedule = engines.scheduler(optimizer)
    losses = []
    for seed in range(3):
        loss = model(**models.batch(model, seed=seed)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.detach())
        saved = optimizer.state_dict()
        assert {value["exp_avg"].dtype for value in saved["state"].values()} == {torch.uint8, torch.float32}
    return losses, average


def test_averages_and_states_between_steps() -> None:
    _, make = dtype_and_factory("fp32, 8 bits")
    expected, model = engines.build(Case()), engines.build(Case())
    one, other = make(expected.parameters()), make(model.parameters())
    losses, average = averaged(expected, one)
    plan = plans.streamed(find_blocks(model), other, options=("keep",), places=("paged", "host", "device"))
    with installed(model, other, plan):
        found, mine = averaged(model, other)
    assert differences(Result(losses, expected, one), Result(found, model, other)) == []
    assert all(torch.equal(a, b) for a, b in zip(average.parameters(), mine.parameters(), strict=True))
