"""Tensors from inside a block that a loss, a log or a cache uses: exact where they need no gradient, else refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from tests.support import models
from tests.support.engines import differences
from tests.support.user_nets import (
    Layer,
    Net,
    adamw,
    by_budget,
    engine_of,
    fault,
    in_every_run,
    ordinary,
    ours,
    plain,
    refusal,
    with_every_budget,
)


class Auxiliary(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = self.linear(x).square().mean()
        return out


class Returning(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.linear(x).square().mean()


class NetOfPairs(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, extra = self.embed(ids), []
        for layer in self.layers:
            x, aux = layer(x)
            extra.append(aux)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * torch.stack(extra).sum()}


def of_attribute() -> Net:
    return Net(Auxiliary, after=lambda net, loss, hidden: loss + sum(layer.aux for layer in net.layers))


def of_hooks() -> Net:
    caught: list[Tensor] = []
    net = Net(after=lambda net, loss, hidden: loss + caught.pop().mean())
    net.layers[2].linear.register_forward_hook(lambda module, args, out: caught.append(out))
    return net


@pytest.mark.parametrize("make", [of_attribute, of_hooks])
def test_a_loss_of_inner_tensors_is_refused_before_training(make: Callable[[], nn.Module]) -> None:
    assert "from inside block layers." in refusal(make)


class Keeping(Layer):
    """Keeps inner tensors in attributes of several kinds, some from the beginning and others later."""

    kinds: tuple[str, ...] = ("plain", "detached", "listed", "paired", "buffer")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.late = 0, 2
        self.listed: list[Tensor] = []
        self.register_buffer("buffer", None)

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        kept = self.linear(x).square().mean()
        self.plain, self.detached, self.last = kept, kept.detach(), x.detach().mean()
        self.listed[:] = [kept * 1]
        self.paired, self.buffer = (self.calls, kept * 1), kept * 1
        self.average = 0.9 * getattr(self, "average", 0.0) + 0.1 * self.detached
        if self.calls > self.late:
            self.fresh, self.loose = kept * 1, kept.detach()
        return super().inner(x) + self.average


def with_auxiliary(pick: Callable[[Any], Tensor], late: int = 2) -> Callable[[], Net]:
    """A net whose loss uses something of a layer from its third iteration on."""

    def make() -> Net:
        calls = iter(range(100))

        def after(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
            return loss + 0.1 * pick(net.layers[1]) if next(calls) >= late else loss

        return Net(Keeping, after=after)

    return make


LATE_TENSORS: dict[str, Callable[[Any], Tensor]] = {
    "plain": lambda layer: layer.plain,
    "listed": lambda layer: layer.listed[0],
    "paired": lambda layer: layer.paired[1],
    "buffer": lambda layer: layer.buffer,
    "fresh": lambda layer: layer.fresh,
}

LOGGED: dict[str, Callable[[Any], Tensor]] = {
    "detached by us": lambda layer: layer.plain.detach() + layer.fresh.detach(),
    "detached": lambda layer: layer.detached,
    "average": lambda layer: layer.average + float(layer.last.numpy()),
    "late": lambda layer: layer.loose + layer.listed[0].item(),
}


@in_every_run
@pytest.mark.parametrize("name", LATE_TENSORS)
def test_a_loss_that_uses_inner_tensors_later_on_is_refused(name: str, options: tuple[str, ...]) -> None:
    assert "the loss uses" in fault(options, ordinary, with_auxiliary(LATE_TENSORS[name]))


@in_every_run
@pytest.mark.parametrize("name", LOGGED)
def test_inner_tensors_without_gradients_may_be_used(name: str, options: tuple[str, ...]) -> None:
    make = with_auxiliary(LOGGED[name])
    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.layers, found.model.layers, strict=True):  # type: ignore[arg-type]
        for kept in ("plain", "detached", "fresh", "loose", "average"):
            assert torch.equal(getattr(left, kept), getattr(right, kept))
            assert getattr(left, kept).requires_grad == getattr(right, kept).requires_grad


returning_pairs = partial(NetOfPairs, Returning)


@with_every_budget
def test_what_a_block_returns_may_be_part_of_the_loss(budget: str) -> None:
    assert differences(plain(returning_pairs), by_budget(returning_pairs, budget)) == []


def test_router_logits_and_collected_outputs_are_refused() -> None:
    options = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = models.build("mixtral", **options, output_router_logits=True)
    with pytest.raises(UnsupportedError, match="from inside block"):
        lt_offload.profile(model, models.batch(model), optimizer=adamw(model))
    model = models.build()
    given: list[dict[str, Any]] = [{"use_cache": True}, {"output_attentions": True}]
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    given.append({cache: transformers.DynamicCache(config=model.config), "use_cache": False})
    for arguments in given:
        batch = models.batch(model) | arguments
        with pytest.raises(UnsupportedError, match="past_key_values|cache=|attentions"):
            lt_offload.profile(model, batch, optimizer=adamw(model))


@in_every_run
def test_a_cache_that_comes_later_is_refused(options: tuple[str, ...]) -> None:
    model = models.build()
    batch = models.batch(model)
    optimizer = adamw(model)
    with engine_of(model, optimizer, options):
        model(**batch).loss.backward()
        optimizer.step()
        with pytest.raises(UnsupportedError, match=r"block .* was called with (past_key_values|cache|use_cache)="):
            model(**batch, use_cache=True)
