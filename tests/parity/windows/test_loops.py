"""Windows and clipping in loops that people write: exact, or refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lt_offload
from lt_offload.errors import ConfigError, PlanError, UnsupportedError
from lt_offload.execute.engine import Engine
from tests import sampling
from tests.support import models
from tests.support.profiles.budgets import named_by

Loop = tuple[nn.Module, torch.optim.Optimizer, Engine]


@contextmanager
def ours(**settings: Any) -> Iterator[Loop]:
    model = models.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    batch = models.batch(model)
    settings = {"memory": "100MB", "accelerator": "cpu"} | settings
    with lt_offload.offloaded(model, optimizer, batch, **settings) as engine:
        yield model, optimizer, engine


def backward(model: nn.Module, seed: int) -> None:
    model(**models.batch(model, seed=seed)).loss.backward()


def plainly(steps: Any) -> nn.Module:
    model = models.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    steps(model, optimizer, None)
    return model


def require_equal(steps: Any, **settings: Any) -> None:
    """Run ``steps`` with and without an engine."""
    expected = plainly(steps)
    with ours(**settings) as (model, optimizer, engine):
        steps(model, optimizer, engine)
    start = models.build().state_dict()
    found = model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.state_dict().items())
    assert any(not torch.equal(value, start[name]) for name, value in found.items())


def windows(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    for seeds in ((0, 1), (2, 3), (4,)):
        if engine is not None:
            engine.accumulate = len(seeds)
        for seed in seeds:
            model.lm_head.weight.norm()  # weights may be read in between
            backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


def test_windows_of_a_loop() -> None:
    require_equal(windows, accumulate=2)


def short(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    for number, seeds in enumerate(((0,), (1, 2), (3,), (4,))):
        for seed in seeds:
            backward(model, seed)
        if number == 2:
            model(**models.batch(model, seed=5))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize("options", [{}, {"activation_offload": False}, {"delayed": True}])
def test_windows_may_be_shorter_than_was_said(options: dict[str, Any]) -> None:
    least = named_by(lambda: run(short, memory=10_000, accumulate=2, **options))
    for memory in sampling.one((least, 2 * least, 100_000_000)):
        require_equal(short, accumulate=2, memory=memory, **options)


def weighted(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    """Weight losses by what gradients are before the forward and after it, and clear them where loops do."""
    for seed in range(6):
        if seed == 2:
            optimizer.zero_grad()
        norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        loss = model(**models.batch(model, seed=seed)).loss
        norms += [float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None]
        if seed == 4:
            optimizer.zero_grad()
        (loss * (1 + sum(norms))).backward()
        if seed == 5:
            optimizer.step()


@pytest.mark.sampled
def test_gradients_are_shown_until_the_next_backward() -> None:
    require_equal(weighted, delayed=True)


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"accumulate": 2, "activation_offload": False}, {}, {"delayed": True}]
)
def test_gradients_that_are_not_there_are_refused_until_the_next_backward(options: dict[str, Any]) -> None:
    windows = options.get("accumulate", 1)
    with ours(**options) as (model, optimizer, _):
        backward(model, 0)
        if windows == 1:
            optimizer.step()
        loss = model(**models.batch(model, seed=1)).loss
        with pytest.raises(UnsupportedError, match=r"the gradient of weight .*lm_head.weight was used by norm"):
            model.lm_head.weight.grad.norm()
        if windows == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clip(model: nn.Module, engine: Engine | None, **options: Any) -> torch.Tensor:
    if engine is None:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
    return engine.clip_grad_norm_(0.1, **options)


def skipping(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    for seed in range(4):
        backward(model, seed)
        if seed % 2:
            optimizer.step()
        optimizer.zero_grad()


def sometimes(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    """Clip every second update, by norm and then by value."""
    for seed in range(4):
        backward(model, seed)
        if seed % 2:
            clip(model, engine)
            if engine is None:
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            else:
                engine.clip_grad_value_(1e-3)
        optimizer.step()
        optimizer.zero_grad()


def clipped_and_skipped(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    """What was clipped and thrown away does not count for the next update."""
    for seed in range(4):
        backward(model, seed)
        if seed % 2:
            clip(model, engine)
            optimizer.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()


def by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    """Clip, scale and put noise on gradients as in any loop, over one and several micro-batches."""
    for seeds in ((0,), (1, 2), (3, 4, 5)):
        for seed in seeds:
            backward(model, seed)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        generator = torch.Generator().manual_seed(seeds[0])
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=1e-3)
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()


def unevenly(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    """Replace, remove and zero gradients; look at them in the middle of a window."""
    for turn in range(4):
        backward(model, turn)
        for at, parameter in enumerate(model.parameters()):
            if at % 3 == turn % 3:
                parameter.grad = None
            elif at % 3 == 1:
                parameter.grad = parameter.grad.sign() if parameter.grad is not None else None
        if turn % 2:
            optimizer.zero_grad(set_to_none=False)  # before the step that stays a gradient, of zeros
        backward(model, turn + 10)
        model.lm_head.weight.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    for seed in range(3):

        def closure(seed: int = seed) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(**models.batch(model, seed=seed)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [skipping, sometimes, clipped_and_skipped, by_torch, unevenly, in_a_closure])
def test_updates_that_wait_for_the_step(steps: Any) -> None:
    require_equal(steps, delayed=True)


def test_a_closure_that_clips_where_updates_do_not_wait_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="delayed=True"):
        run(in_a_closure)


def test_a_norm_that_is_not_finite_updates_nothing() -> None:
    with ours(delayed=True) as (model, optimizer, engine):
        before = copy.deepcopy(model.state_dict())
        (model(**models.batch(model)).loss * float("nan")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.zero_grad()
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        backward(model, 1)
        optimizer.step()
        assert not torch.equal(before["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_what_is_refused() -> None:
    with ours() as (model, optimizer, engine):
        with pytest.raises(PlanError, match="accumulate=2 or more"):
            engine.accumulate = 2
        with pytest.raises(UnsupportedError, match="delayed=True"):
            engine.clip_grad_norm_(1.0)
        with pytest.raises(UnsupportedError, match="delayed=True.*engine.clip_value needs no waiting"):
            engine.clip_grad_value_(1.0)
        with pytest.raises(ConfigError, match="clip_value=0 must be more than 0"):
            engine.clip_value = 0
        with pytest.raises(ConfigError, match="max_norm=-1"):
            engine.clip_grad_norm_(-1)
    with pytest.raises(ConfigError, match="accumulate=0 must be at least 1"), ours(accumulate=0):
        pass


def late(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    for seed in range(3):
        backward(model, seed)


def resized(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    backward(model, 0)
    assert engine is not None
    engine.accumulate = 1


def zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    backward(model, 0)
    optimizer.zero_grad()
    backward(model, 1)


def clipped_twice(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    backward(model, 0)
    clip(model, engine)
    clip(model, engine)


def clipped_too_early(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    backward(model, 0)
    clip(model, engine)
    backward(model, 1)


def read_after_clipping(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    backward(model, 0)
    clip(model, engine)
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def kept_by_views(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None) -> None:
    backward(model, 0)
    rows = [p.grad[:1] for p in model.parameters() if p.grad is not None]
    optimizer.step()
    assert rows


def run(steps: Any, **settings: Any) -> None:
    with ours(**settings) as (model, optimizer, engine):
        steps(model, optimizer, engine)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (late, "second time after a backward"),
        (resized, "after 1 of 2 micro-batches"),
        (zeroed, "removed or replaced"),
    ],
)
def test_other_numbers_of_micro_batches_than_was_said(steps: Any, message: str) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        run(steps, accumulate=2)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (read_after_clipping, "engine.clip_grad_norm_"),
        (kept_by_views, "was kept"),
        (clipped_twice, "clipped already"),
        (clipped_too_early, "called after its gradients had been clipped"),
    ],
)
def test_gradients_that_nobody_has_are_not_used_silently(steps: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        run(steps, delayed=True)
