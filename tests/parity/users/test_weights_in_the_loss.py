"""A loss that reads weights outside their block, steps that write them, plans that are replayed: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from tests.support.engines import differences
from tests.support.user_nets import (
    HIDDEN,
    Layer,
    Net,
    adamw,
    by_budget,
    engine_of,
    fault,
    in_every_run,
    measured,
    ordinary,
    plain,
    refusal,
    rows,
    with_every_budget,
)

PENALTIES: dict[str, Callable[..., Tensor]] = {
    "a layer's weight": lambda net, loss, hidden: loss + 0.1 * net.layers[1].linear.weight.square().sum(),
    "all weights": lambda net, loss, hidden: loss + 0.1 * sum(p.norm() for p in net.parameters()),
    "the head": lambda net, loss, hidden: loss + F.linear(torch.ones(HIDDEN), net.head.weight).mean(),
}


class TiedByFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.head(x), self.embed.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("name", ["a layer's weight", "all weights"])
def test_a_loss_of_layers_weights_is_refused_before_training(name: str) -> None:
    assert "outside its block" in refusal(lambda: Net(after=PENALTIES[name]))


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (TiedByFunction, "embed"),
    "the head": (partial(Net, after=PENALTIES["the head"]), "head"),
}


@with_every_budget
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_used_outside_its_block_as_well_stays_on_the_device(name: str, budget: str) -> None:
    make, staying = OUTSIDE[name]
    assert staying not in [block.name for block in measured(make).blocks]
    assert differences(plain(make), by_budget(make, budget)) == []


@in_every_run
def test_such_a_loss_later_on_is_refused_when_it_comes(options: tuple[str, ...]) -> None:
    def make() -> Net:
        calls = iter(range(100))
        return Net(after=lambda n, loss, h: PENALTIES["all weights"](n, loss, h) if next(calls) > 1 else loss)

    assert "outside its block" in fault(options, ordinary, make)


def log_norms(net: nn.Module, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    net.__dict__.setdefault("norms", []).append([float(p.norm().detach()) for p in net.parameters()])
    return loss


logging_norms = partial(Net, after=log_norms)


@with_every_budget
def test_norms_in_the_step(budget: str) -> None:
    expected, found = plain(logging_norms), by_budget(logging_norms, budget)
    assert expected.model.norms == found.model.norms[-len(expected.model.norms) :]  # type: ignore[union-attr, operator]
    assert differences(expected, found) == []


def test_a_weight_that_meets_a_tensor_of_the_device_is_named() -> None:
    model = Net()
    optimizer = adamw(model)
    refused = pytest.raises(UnsupportedError, match=r"head\.weight.*outside its block")
    with engine_of(model, optimizer, ("keep",)), refused:
        F.linear(torch.empty(3, HIDDEN, device="meta"), model.head.weight)


def saved_plan(model: nn.Module) -> Any:
    optimizer = adamw(model)
    return lt_offload.solve(lt_offload.profile(model, rows()[0], optimizer=optimizer), memory="10MB")


def test_a_replayed_plan_is_no_way_around_the_refusals() -> None:
    plan = saved_plan(Net())
    model = Net(after=PENALTIES["all weights"])
    context = lt_offload.offloaded(model, adamw(model), rows()[0], plan=plan, accelerator="cpu")
    with pytest.raises(UnsupportedError, match="outside its block"), context:
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "1MB"}, r"the plan needs memory=10 MB, memory=1 MB was given"),
        ({"planner": "l2l"}, r"planner='l2l' is a setting of planning, and a plan was given"),
        ({"memory": "900TB"}, r"memory=900 TB is more than there is"),
    ],
)
def test_settings_that_a_replayed_plan_leaves_no_room_for(settings: dict[str, Any], message: str) -> None:
    model = Net()
    plan = saved_plan(model)
    context = lt_offload.offloaded(model, adamw(model), rows()[0], plan=plan, accelerator="cpu", **settings)
    with pytest.raises(lt_offload.ConfigError, match=message), context:
        pass


class Clamping(Layer):
    """Keeps its weight within bounds by ``.data``, which says the same in a second run and moves no version."""

    def inner(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().inner(x)


class Normalizing(Net):
    """Normalizes its head's weight in the forward, with ``.data`` or under ``no_grad``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weight = self.head.weight
        with torch.no_grad():
            (weight.data if self.way == "data" else weight).copy_(F.normalize(weight.data, dim=1))
        return super().forward(ids, labels)


WRITTEN: dict[str, tuple[Callable[[], Net], str]] = {
    "in a block": (partial(Net, Clamping), "layers.0.linear.weight is written by aten.clamp_"),
    "outside it": (partial(Normalizing, "data"), "head.weight is written by aten.copy_"),
    "without data": (partial(Normalizing, "no_grad"), "head.weight is written by aten.copy_"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_that_a_step_writes_are_refused_before_training(name: str) -> None:
    make, what = WRITTEN[name]
    assert f"weight {what}" in (message := refusal(make))
    assert "after optimizer.step()" in message
