"""Updates give the user's optimizer's own numbers, whichever way they take, and norms of gradients are torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.clipping import norms, total_norm
from lt_offload.execute.updates.optimizer import Updates
from tests.support.engines import equal

Make = Callable[[Any], Optimizer]

MAKES: dict[str, Make] = {
    "adamw-fused": lambda groups: AdamW(groups, lr=1e-2, fused=True),
    "adamw-foreach": lambda groups: AdamW(groups, lr=1e-2, foreach=True),
    "adam-fused-amsgrad": lambda groups: Adam(groups, lr=1e-2, amsgrad=True, fused=True),
    "sgd-nesterov": lambda groups: SGD(groups, lr=1e-1, momentum=0.9, nesterov=True, foreach=True),
    "adamw-tensor-lr": lambda groups: AdamW(groups, lr=torch.tensor(1e-2), fused=True),
    "adafactor": lambda groups: Adafactor(groups, lr=1e-2),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((33, 7), (5,), (64, 64), (1,), (9, 3))]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]


class Twins:
    """The same parameters twice: updated by ``step()``, and by :class:`Updates` in two parts."""

    def __init__(self, make: Make) -> None:
        self.plain, self.ours = parameters(), parameters()
        self.optimizer, self.other = make(groups(self.plain)), make(groups(self.ours))
        self.weights = [Weight(i, f"w{i}", param) for i, param in enumerate(self.ours)]
        self.updates = Updates(self.other)
        self.round = 0

    def update(self, place: str = "host") -> None:
        torch.manual_seed(10 + self.round)
        self.round += 1
        grads = [torch.randn_like(param) for param in self.plain]
        for param, grad in zip(self.plain, grads, strict=True):
            param.grad = grad.clone()
        self.optimizer.step()
        self.other.step()  # as users do; it finds no gradients
        self.updates.index_groups()
        for part in (slice(0, 3), slice(3, 5)):
            if place == "host":
                with torch.no_grad():
                    self.updates.prepare(self.weights[part], grads[part])()
            else:
                for weight in self.weights[part]:
                    weight.view = weight.host  # what belongs to no group is updated where it is
                self.updates.update_on_device(self.weights[part], grads[part])

    def equal(self) -> bool:
        left, right = self.optimizer.state_dict(), self.other.state_dict()
        same = all(torch.equal(a, b) for a, b in zip(self.plain, self.ours, strict=True))
        same = same and left["state"].keys() == right["state"].keys()
        for key, state in left["state"].items():
            for name, value in state.items():
                other = right["state"][key][name]
                same = same and (torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other)
        return same and left["param_groups"] == right["param_groups"]


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("name", MAKES)
def test_numbers_are_those_of_the_optimizer_whatever_its_schedule(name: str, place: str) -> None:
    twins = Twins(MAKES[name])
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda at: 1 / (1 + at)) for o in (twins.optimizer, twins.other)]
    for at in range(4):
        twins.update(place)
        for schedule in schedules:
            schedule.step()
        for optimizer in (twins.optimizer, twins.other):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * at
    assert twins.equal()


@pytest.mark.parametrize("frozen", [False, True], ids=["queued before", "frozen before"])
@pytest.mark.parametrize("make", [MAKES["adamw-fused"], MAKES["adamw-tensor-lr"]], ids=["number", "tensor"])
def test_options_are_those_of_the_moment_when_an_update_is_queued(make: Make, frozen: bool) -> None:
    """Or when the loop's own step has begun."""
    twins = Twins(make)
    twins.update()
    grads = [torch.ones_like(param) for param in twins.ours]
    for param, grad in zip(twins.plain, grads, strict=True):
        param.grad = grad.clone()
    prepare = partial(twins.updates.prepare, twins.weights, grads)
    queued = twins.updates.freeze() if frozen else prepare()
    twins.optimizer.step()
    for optimizer in (twins.optimizer, twins.other):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(1.0) if isinstance(group["lr"], torch.Tensor) else 1.0
    with torch.no_grad():
        (queued or prepare())()
    assert twins.equal()


@pytest.mark.parametrize("name", ["adamw-fused", "adafactor"])
def test_snapshots_are_told_of_every_update_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(MAKES[name])
    twins.update()
    told: list[int] = []
    monkeypatch.setattr(twins.updates.snapshots, "changing", lambda tensors: told.extend(map(id, tensors)))
    twins.update()
    states = [value for state in twins.other.state.values() for value in state.values()]
    assert {id(tensor) for tensor in (*(w.host for w in twins.weights), *states)} <= set(told)


def test_states_are_in_the_order_of_the_parameters() -> None:
    """Updates make them in another order; whoever goes through ``optimizer.state`` sees that of a plain step."""
    twins = Twins(MAKES["adamw-fused"])
    twins.update()
    twins.updates.order_states()
    order = {id(param): at for params in (twins.plain, twins.ours) for at, param in enumerate(params)}
    ours, plain = ([order[id(param)] for param in made.state] for made in (twins.other, twins.optimizer))
    assert ours == plain != sorted(plain)


def test_norms_of_several_dtypes_are_put_together_in_torchs_order() -> None:
    generator = torch.Generator().manual_seed(3)
    dtypes = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}
    in_another_order = 0
    for order in ("fb", "bf", "fbh", "hbf", "fbbfhf") * 10:
        grads = [torch.randn(7, generator=generator).to(dtypes[kind]) for kind in order * 20]
        expected = get_total_norm(grads, 2.0)
        for count in (1, len(grads) // 2, len(grads)):
            known = dict(zip(map(id, grads), norms(grads[:count]), strict=False))
            assert equal(total_norm(grads, 2.0, known=known), expected)
        appearing = [grad for dtype in dict.fromkeys(g.dtype for g in grads) for grad in grads if grad.dtype == dtype]
        ordered = torch.stack([norm.float() for norm in norms(appearing)])
        in_another_order += not equal(torch.linalg.vector_norm(ordered), expected)
    assert in_another_order > 0, "the order made no difference"


def test_a_norm_that_is_not_finite_is_torchs_error() -> None:
    grads = [torch.ones(3), torch.full((2,), math.inf)]
    known = dict(zip(map(id, grads), norms(grads), strict=True))
    with pytest.raises(RuntimeError, match="non-finite"):
        total_norm(grads, 2.0, known=known, error_if_nonfinite=True)
    assert total_norm(grads, 2.0, known=known).item() == math.inf
