"""Trains one model plainly and through plans for windows of micro-batches, and compares everything bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import lt_offload
from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.execute.memory.activations import ROUNDING
from lt_offload.plan import Plan
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.support import models
from tests.support.engines import Factory, Result, carried_out, differences, in_windows, make_optimizer

Shape = tuple[int, int]
"""Samples and tokens."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and its windows: per optimizer step, the shapes of its micro-batches."""

    start: nn.Module
    windows: Sequence[Sequence[Shape]]
    optimizer: str | Factory = "adamw-fused"
    clip_norm: float | None = None
    clip_value: float | None = None

    def batches(self) -> list[list[dict[str, torch.Tensor]]]:
        """Return the micro-batches; no two are alike."""
        seeds = iter(range(1000))
        return [
            [models.batch(self.start, batch_size=b, sequence_length=s, seed=next(seeds)) for b, s in window]
            for window in self.windows
        ]

    def profile(self) -> Profile:
        """Measure a step."""
        model = copy.deepcopy(self.start)
        largest = max((shape for window in self.windows for shape in window), key=lambda shape: shape[0] * shape[1])
        batch = models.batch(model, batch_size=largest[0], sequence_length=largest[1], seed=99)
        return lt_offload.profile(model, batch, optimizer=make_optimizer(model, self.optimizer))

    def plainly(self, changed: Callable[[nn.Module], None] = lambda _model: None) -> Result:
        """Train without the engine; ``changed``: is done to the model before."""
        model = copy.deepcopy(self.start)
        changed(model)
        optimizer = make_optimizer(model, self.optimizer)
        torch.manual_seed(7)
        losses = in_windows(model, optimizer, self.batches(), clip_norm=self.clip_norm, clip_value=self.clip_value)
        return Result(losses, model, optimizer)

    def by(self, plan: Plan) -> tuple[Result, Engine]:
        """Train by ``plan``, on an emulated device that checks every access and holds the budget."""
        model = copy.deepcopy(self.start)
        optimizer = make_optimizer(model, self.optimizer)
        with carried_out(model, optimizer, plan) as engine:
            device = engine.device
            engine.follow(optimizer)
            engine.clip_value = self.clip_value
            torch.manual_seed(7)
            losses = []
            for window in self.batches():
                if plan.window > 1:
                    engine.accumulate = len(window)
                for batch in window:
                    with device.accounting():
                        loss = model(**batch).loss / len(window)
                        loss.backward()
                    losses.append(loss.detach().clone())
                if self.clip_norm is not None:
                    losses.append(engine.clip_grad_norm_(self.clip_norm))
                with device.accounting():
                    optimizer.step()
                optimizer.zero_grad()
            assert engine.stats.iterations == len(self.windows)
            assert engine.stats.device_peak_bytes <= plan.budget_bytes
            if len({shape for window in self.windows for shape in window}) == 1:  # as planned
                assert engine.stats.device_peak_bytes <= plan.predicted.device_peak_bytes
                ram = engine.stats.host_peak_bytes - ROUNDING * len(plan.options)
                assert ram <= plan.predicted.host_peak_bytes <= plan.host_budget_bytes
        return Result(losses, model, optimizer), engine


def budgets(profile: Profile, **settings: object) -> list[int]:
    """Return a budget near the smallest, one in the middle, and one in which everything stays; a run takes one."""
    least = 1000
    while True:
        try:
            lt_offload.solve(profile, memory=least, **settings)  # type: ignore[arg-type]
            break
        except (InfeasibleError, UnsupportedError) as error:
            least = max(int(1.2 * least), getattr(error, "needed_bytes", None) or 0)
    everything = sum(3 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    activations = sum(block.option("keep").saved_bytes for block in profile.blocks)
    most = least + everything + activations + profile.shared_bytes + (16 << 20)
    return sampling.one((int(1.05 * least), (least + most) // 3, most))


def require_equal(training: Training, plan: Plan, expected: Result) -> None:
    """Carry ``plan`` out and compare with plain training."""
    found, _ = training.by(plan)
    assert differences(expected, found) == []
