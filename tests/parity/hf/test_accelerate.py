"""Optimizers and models that accelerate has wrapped: refused by name, and what is named instead trains as plainly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from tests.support.engines import Result, differences
from tests.support.user_nets import Net, adamw, by_budget, plain, planned, rows, seed, with_every_budget


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


def loop_of(accelerator: Accelerator, model: Any, prepared: Any) -> list[Tensor]:
    """The loop that accelerate's users write."""
    losses = []
    for batch in rows():
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def test_a_prepared_optimizer_is_refused(accelerator: Accelerator) -> None:
    model = Net()
    model, prepared = accelerator.prepare(model, adamw(model))
    named = pytest.raises(UnsupportedError, match=r"optimizer AcceleratedOptimizer: .* prepared\.optimizer")
    with named as caught, lt_offload.offloaded(model, prepared, rows()[0], memory="1GB", accelerator="cpu"):
        raise AssertionError
    assert str(caught.value).count("\n- ") == 1


@with_every_budget
def test_the_optimizer_inside_trains_as_plainly(accelerator: Accelerator, budget: str) -> None:
    model = Net()
    model, prepared = accelerator.prepare(model, adamw(model))
    seed()
    expected = Result(loop_of(accelerator, model, prepared), model, prepared.optimizer)

    model = Net()
    model, prepared = accelerator.prepare(model, adamw(model))
    with lt_offload.offloaded(model, prepared.optimizer, rows()[0], plan=planned(Net, budget), accelerator="cpu"):
        seed()
        losses = loop_of(accelerator, model, prepared)
    assert differences(expected, Result(losses, model, prepared.optimizer)) == []


def given_back() -> nn.Module:
    model = cpu_offload(Net(), torch.device("cpu"))
    remove_hook_from_submodules(model)
    return model


@with_every_budget
def test_a_model_without_its_hooks_trains_as_plainly(budget: str) -> None:
    assert differences(plain(Net), by_budget(given_back, budget)) == []
