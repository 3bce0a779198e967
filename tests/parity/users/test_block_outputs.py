"""Outputs of blocks that several places use, and models that are no chain: exact, or refused before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_offload
from tests.support.engines import Result, differences
from tests.support.profiles.budgets import least
from tests.support.user_nets import (
    Layer,
    Net,
    adamw,
    deep_supervision,
    fault,
    in_every_run,
    measured,
    ordinary,
    ours,
    plain,
    refusal,
    rows,
    seed,
)


class Skips(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        first = self.layers[0](x)
        x = self.layers[2](self.layers[1](first))
        logits = self.head(self.layers[3](x + first))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Sequential(Layer):
    """Uses its input once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("make", [Skips, lambda: Net(after=deep_supervision)], ids=["skips", "supervision"])
def test_several_consumers_of_a_residual_block_are_refused_before_training(make: Callable[[], nn.Module]) -> None:
    assert "is used in several places" in refusal(make)


@in_every_run
@pytest.mark.parametrize(
    "make",
    [lambda: Skips(Sequential), lambda: Net(Sequential, after=deep_supervision)],
    ids=["skips", "supervision"],
)
def test_several_consumers_of_a_block_that_uses_its_input_once(
    make: Callable[[], nn.Module], options: tuple[str, ...]
) -> None:
    model = make()
    lt_offload.profile(model, rows()[0], optimizer=adamw(model))
    assert differences(plain(make), ours(make, options)) == []


def supervised_late(layer: Callable[[], nn.Module] = Layer, late: int = 2) -> Callable[[], Net]:
    """A net whose loss uses the outputs of all layers from its third iteration on."""

    def make() -> Net:
        net = Net(layer, after=deep_supervision)
        calls = iter(range(100))

        def later(module: nn.Module, args: Any, kwargs: Any) -> None:
            net.after = deep_supervision if next(calls) >= late else plainly

        net.register_forward_pre_hook(later, with_kwargs=True)
        return net

    return make


def plainly(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    return loss


class SkippingLate(Skips):
    """Adds a skip from its third iteration on."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.__dict__["calls"] = vars(self).get("calls", 0) + 1
        return super().forward(ids, labels) if self.calls > 2 else Net.forward(self, ids, labels)


@in_every_run
@pytest.mark.parametrize("make", [supervised_late(), SkippingLate], ids=["supervision", "skip"])
def test_several_consumers_that_come_later_are_refused(make: Callable[[], nn.Module], options: tuple[str, ...]) -> None:
    assert "is used in several places" in fault(options, ordinary, make)


@in_every_run
def test_outputs_of_blocks_may_be_watched(options: tuple[str, ...]) -> None:
    """Logged with a graph, with hooks and gradients of their own, and used by the loss later where that is exact."""

    def watching(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
        net.__dict__.setdefault("norms", []).extend(float(h.norm().detach()) for h in net.outputs)
        return loss

    def make(layer: Callable[[], nn.Module] = Layer) -> Net:
        net = Net(layer, after=watching)

        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            out.register_hook(lambda gradient: gradient * 0.9)
            out.retain_grad()
            net.__dict__["outputs"] = [out]

        net.layers[1].register_forward_hook(keep)
        return net

    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    assert torch.equal(expected.model.outputs[0].grad, found.model.outputs[0].grad)  # type: ignore[union-attr, index]
    assert expected.model.norms == found.model.norms
    make = supervised_late(Sequential)
    assert differences(plain(make), ours(make, options)) == []


class Retaining(Net):
    """Keeps what its layers return until its next forward, with the gradients: a probe of activations."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        self.kept: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
            x.retain_grad()
            self.kept.append(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Detaching(Net):
    """Keeps its logits and what one of its layers returns, without their graphs."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 1:
                hidden = x.detach()
        logits = self.head(x)
        self.kept = [hidden, logits.detach()]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Scaled(Layer):
    """Leaves the weight that it uses in an attribute, as hooks of ``nn.utils.weight_norm`` do."""

    def inner(self, x: Tensor) -> Tensor:
        self.weight = self.linear.weight * 0.5
        return F.gelu(F.linear(x, self.weight, self.linear.bias))


class Scaling(Net):
    def __init__(self) -> None:
        super().__init__(Scaled)
        self.kept: list[Tensor] = []


@pytest.mark.parametrize("make", [Retaining, Detaching, Scaling])
@pytest.mark.parametrize("switches", [{}, {"activation_offload": False}])
def test_what_outlives_a_step_is_in_the_smallest_budget(make: Any, switches: dict[str, Any]) -> None:
    def look(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        losses = ordinary(model, optimizer, batches)
        return losses + [(x.detach() if x.grad is None else x.grad).clone() for x in model.kept]

    profile = measured(make)
    plan = lt_offload.solve(profile, memory=least(profile, **switches), **switches)
    model = make()
    optimizer = adamw(model)
    with lt_offload.offloaded(model, optimizer, rows()[0], plan=plan, accelerator="cpu"):
        seed()
        losses = look(model, optimizer, rows())
    assert len(losses) == 4 + len(model.kept)
    assert differences(plain(make, look), Result(losses, model, optimizer)) == []
