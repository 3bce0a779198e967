"""Norms of gradients are found on the device, before they leave: of what updates use, in plain PyTorch's bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lt_offload import offloaded, solve
from lt_offload.errors import ConfigError
from lt_offload.execute.engine import Engine
from tests.parity.windows.training import Training
from tests.support import models, trainers
from tests.support.engines import equal, make_optimizer

MAX_NORM = 0.2
Clip = Callable[..., Tensor]


def first_of(model: nn.Module) -> nn.Parameter:
    return next(param for param in model.parameters() if param.requires_grad)


def once(model: nn.Module, clip: Clip) -> Tensor:
    return clip()


def scaled(model: nn.Module, clip: Clip) -> Tensor:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
    return clip()


def replaced(model: nn.Module, clip: Clip) -> Tensor:
    param = first_of(model)
    assert param.grad is not None
    param.grad = param.grad * 3
    return clip()


def written_by_numpy(model: nn.Module, clip: Clip) -> Tensor:
    param = first_of(model)
    assert param.grad is not None
    view = param.grad.numpy()
    view[:] = 1e-3
    del view
    return clip()


def left_out(model: nn.Module, clip: Clip) -> Tensor:
    first_of(model).grad = None
    return clip()


def added_to(model: nn.Module, clip: Clip) -> Tensor:
    model(**models.batch(model, seed=50)).loss.backward()
    return clip()


def of_the_largest(model: nn.Module, clip: Clip) -> Tensor:
    return clip(norm_type=math.inf)


def of_the_sum(model: nn.Module, clip: Clip) -> Tensor:
    return clip(norm_type=1.0)


def of_some(model: nn.Module, clip: Clip) -> Tensor:
    return clip(parameters=[*model.parameters()][::2])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, between: Any, engine: Engine | None) -> list[Tensor]:
    """Return the norms of three updates."""

    def clip(norm_type: float = 2.0, parameters: list[nn.Parameter] | None = None) -> Tensor:
        if engine is not None and parameters is None:
            return engine.clip_grad_norm_(MAX_NORM, norm_type)
        return clip_grad_norm_(model.parameters() if parameters is None else parameters, MAX_NORM, norm_type)

    found = []
    for seed in range(3):
        model(**models.batch(model, seed=seed)).loss.backward()
        found.append(between(model, clip).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "between",
    [once, scaled, replaced, written_by_numpy, left_out, added_to, of_the_largest, of_the_sum, of_some],
)
def test_norms_are_those_of_what_updates_use(between: Any) -> None:
    start = models.build("llama")
    plain = copy.deepcopy(start)
    expected = train(plain, make_optimizer(plain, "adamw-fused"), between, None)
    for memory in trainers.budgets(start):
        model = copy.deepcopy(start)
        optimizer = make_optimizer(model, "adamw-fused")
        batch = models.batch(model)
        with offloaded(model, optimizer, batch, memory=memory, accelerator="cpu", delayed=True) as engine:
            assert all(map(equal, train(model, optimizer, between, engine), expected))
        assert all(map(equal, plain.state_dict().values(), model.state_dict().values()))


def test_a_norm_of_some_gradients_is_not_taken_for_that_of_all() -> None:
    model = models.build("llama")
    optimizer = make_optimizer(model, "adamw-fused")
    batch = models.batch(model)
    with offloaded(model, optimizer, batch, memory="200MB", accelerator="cpu", delayed=True) as engine:
        model(**batch).loss.backward()
        with pytest.raises(ConfigError, match=r"parameters=\d+ tensors leaves out .*torch.nn.utils.clip_grad_norm_"):
            engine.clip_grad_norm_(MAX_NORM, parameters=[*model.parameters()][::2])
        optimizer.step()


@pytest.mark.parametrize(("window", "where"), [(1, "host"), (1, "device"), (2, "host"), (2, "device")])
def test_which_norms_are_known_when_a_backward_has_ended(window: int, where: str) -> None:
    """A sum of one gradient was on the device whole; of several, where it is added up."""
    training = Training(start=models.build("llama"), windows=[[(2, 12)]])
    settings: dict[str, Any] = {"planner": "stream", "host_update": where == "host", "accumulate": window}
    plan = solve(training.profile(), memory="1GB", delayed=True, **settings)
    assert set(plan.update_places) == ({"host"} if where == "host" else {"paged"})
    model = copy.deepcopy(training.start)
    optimizer = make_optimizer(model, "adamw-fused")
    with offloaded(model, optimizer, models.batch(model), plan=plan, accelerator="cpu") as engine:
        if window > 1:
            engine.accumulate = window
        for seed in range(window):
            known = [weight.total.norm for weight in engine.weights if weight.total is not None]
            assert known == [None] * len(engine.weights)
            model(**models.batch(model, seed=seed)).loss.backward()
        known = [weight.total.norm for weight in engine.weights if weight.total is not None]
        assert len(known) == len(engine.weights)
        assert all((norm is not None) is (window == 1 or where == "device") for norm in known)
        engine.clip_grad_norm_(MAX_NORM)
        optimizer.step()


def test_another_type_of_norm_reads_gradients_whose_norms_are_known() -> None:
    model = models.build("llama")
    optimizer = make_optimizer(model, "adamw-fused")
    batch = models.batch(model)
    with offloaded(model, optimizer, batch, memory="100MB", accelerator="cpu", delayed=True) as engine:
        model(**batch).loss.backward()
        assert any(weight.total is not None and weight.total.norm is not None for weight in engine.weights)
        largest = get_total_norm([p.grad.clone() for p in model.parameters() if p.grad is not None], math.inf)
        assert equal(engine.clip_grad_norm_(MAX_NORM, math.inf), largest)
        optimizer.step()
