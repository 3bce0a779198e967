"""A GradScaler in loops that people write, in float16 on the emulated device: steps that are left out included."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from tests import sampling
from tests.support import models
from tests.support.engines import Result, differences
from tests.support.profiles.budgets import named_by

STEPS = 6
Seen = list[Tensor]


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def foreach(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=True)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        loss: Tensor = model(**batch).loss
    return loss


def scaler_of(scale: float = 3e10, factor: float = 1e6) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", scale, growth_factor=factor, backoff_factor=1 / factor, growth_interval=2)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: Engine | None,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    by_value: float | None = None,
    looks: bool = False,
    scaled: tuple[float, ...] = (),
    scaler: torch.amp.GradScaler | None = None,
    steps: range = range(STEPS),
) -> Seen:
    """Train as the examples of torch.amp; every third step is left out, beginning with the first."""
    scaler = scaler or scaler_of(*scaled)
    seen: Seen = []
    left_out = []
    for step in steps:
        for part in range(accumulate):
            loss = loss_of(model, models.batch(model, seed=10 * step + part)) / accumulate
            scaler.scale(loss).backward()
            seen.append(loss.detach().clone())
        if looks:
            seen += norms(model)
        if clip or by_value or looks:
            scaler.unscale_(optimizer)
        if looks:
            seen += norms(model)
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        if clip:
            clips = nn.utils.clip_grad_norm_ if engine is None else lambda _, norm: engine.clip_grad_norm_(norm)
            seen.append(clips(model.parameters(), clip).nan_to_num())
        if by_value:
            clamps = nn.utils.clip_grad_value_ if engine is None else lambda _, value: engine.clip_grad_value_(value)
            clamps(model.parameters(), by_value)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        left_out.append(scaler.get_scale() < before)
        seen.append(torch.tensor(scaler.get_scale()))
    assert left_out == [step % 3 == 0 for step in steps]
    return seen


def norms(model: nn.Module) -> Seen:
    return [p.grad.norm().nan_to_num() for p in model.parameters() if p.grad is not None]


CASES: list[dict[str, Any]] = [
    {},
    {"make": fused},
    {"make": adafactor},
    {"accumulate": 3},
    {"clip": 0.1},
    {"clip": 0.1, "scaled": (2.0**34, 2.0**18)},
    {"clip": 0.1, "scaled": (2.0**34, 2.0**18), "accumulate": 2},
    {"make": fused, "clip": 0.1, "accumulate": 2},
    {"by_value": 1e-3},
    {"clip": 0.1, "by_value": 1e-2, "accumulate": 2},
    {"looks": True},
    {"looks": True, "clip": 0.1, "accumulate": 2},
]
WAYS: list[dict[str, Any]] = [{}, {"activation_offload": False}, {"recompute": False}, {"host_update": False}]


def within(memory: int | str, case: dict[str, Any], way: dict[str, Any], run: Callable[..., Seen]) -> tuple[Seen, Any]:
    model = models.build(dropout=0.1)
    optimizer = case.get("make", foreach)(model.parameters())
    settings = {"memory": memory, "accelerator": "cpu", "delayed": True, "run": partial(loss_of, model), **way}
    with lt_offload.offloaded(model, optimizer, models.batch(model), **settings) as engine:  # type: ignore[arg-type]
        torch.manual_seed(1)
        seen = run(model, optimizer, engine)
    return seen, Result([], model, optimizer)


@pytest.mark.parametrize(("case", "way"), sampling.grid(CASES, WAYS, count=5), ids=str)
def test_every_budget_equals_plain_pytorch(case: dict[str, Any], way: dict[str, Any]) -> None:
    model = models.build(dropout=0.1)
    optimizer = case.get("make", foreach)(model.parameters())
    run = partial(loop, **{name: value for name, value in case.items() if name != "make"})
    torch.manual_seed(1)
    plain = run(model, optimizer, None)
    least = named_by(lambda: within(10_000, case, way, run))
    for memory in sampling.one((least, 2 * least, 100_000_000)):
        seen, trained = within(memory, case, way, run)
        assert [*map(torch.equal, seen, plain)] == [True] * len(plain)
        assert differences(Result([], model, optimizer), trained) == []


def clipped_before(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> Seen:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**models.batch(model)).loss).backward()
    engine.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    return []


def without_waiting(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> Seen:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**models.batch(model)).loss).backward()
    scaler.step(optimizer)
    return []


def other(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> Seen:
    """A scaler of another optimizer's gradients finds them where they always are."""
    weight = nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", 4.0)
    beside = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(beside)
    assert weight.item() == 0.0
    return []


def test_gradients_are_unscaled_before_they_are_clipped_and_other_optimizers_are_as_always() -> None:
    message = re.escape("gradients that are clipped already were to be unscaled")
    with pytest.raises(UnsupportedError, match=message):
        within("1GB", {}, {}, clipped_before)
    with pytest.raises(UnsupportedError, match=r"was used by GradScaler.*delayed=True"):
        within("1GB", {}, {"delayed": False}, without_waiting)
    before = torch.amp.GradScaler.__dict__.copy()
    within("1GB", {}, {}, other)
    assert torch.amp.GradScaler.__dict__ == before
