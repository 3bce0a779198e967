"""Contexts around the step: autocast, attention kernels and another default dtype give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_offload.machine.accounting import Account
from tests.support.engines import differences
from tests.support.user_nets import (
    Layer,
    Net,
    adamw,
    by_budget,
    engine_of,
    in_every_run,
    ordinary,
    ours,
    plain,
    refusal,
    rows,
    with_every_budget,
)


class Attending(Layer):
    """Uses its weight twice: where casts are kept, their gradients are added in the low precision."""

    def inner(self, x: Tensor) -> Tensor:
        x = super().inner(super().inner(x))[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


@contextmanager
def autocast_without_cache() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        yield


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no cache": autocast_without_cache,
    "off": lambda: torch.autocast("cpu", enabled=False),
    "kernel": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
}


@in_every_run
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_inside_the_step(name: str, options: tuple[str, ...]) -> None:
    def make() -> Net:
        return Net(Attending, context=CONTEXTS[name])

    assert differences(plain(make), ours(make, options)) == []


in_autocast = partial(Net, Attending, context=CONTEXTS["autocast"])


@with_every_budget
def test_autocast_is_planned_for(budget: str) -> None:
    assert differences(plain(in_autocast), by_budget(in_autocast, budget)) == []


def test_an_evaluation_in_autocast_keeps_no_casts() -> None:
    make = partial(Net, Attending)
    answers, held = [], []
    for context in (CONTEXTS["autocast"], CONTEXTS["no cache"]):
        expected = make()
        model = make()
        optimizer = adamw(model)
        with engine_of(model, optimizer, ("keep",)), torch.no_grad(), context():
            with Account() as account:
                answer = model(**rows()[0])["loss"]
                held.append(account.current)
            answers.append((expected(**rows()[0])["loss"], answer))
    assert all(torch.equal(*pair) for pair in answers)
    assert held[0] == held[1]


class Shared(Net):
    """Two blocks with one weight."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        first, second, *_ = self.layers
        second.linear.weight = first.linear.weight


def test_a_weight_of_two_blocks_without_kept_casts() -> None:
    make = partial(Shared, context=autocast_without_cache)
    assert differences(plain(make), ours(make, ("recompute", "keep"))) == []


def test_a_weight_that_two_blocks_cast_is_refused() -> None:
    message = refusal(partial(Shared, context=CONTEXTS["autocast"]))
    assert "weight layers.0.linear.weight of blocks layers.0 and layers.1" in message
    assert "cache_enabled=False" in message


@in_every_run
def test_autocast_around_the_backward_too(options: tuple[str, ...]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ordinary(model, optimizer, batches[:1])

    def make() -> Net:
        return Net(Attending)

    assert differences(plain(make, loop), ours(make, options, loop)) == []


@contextmanager
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Making(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * torch.full((1,), 1 / 3).float()


@in_every_run
def test_another_default_dtype_around_the_forward(options: tuple[str, ...]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        return ordinary(model, optimizer, batches, around_forward=double_precision)

    def make() -> Net:
        return Net(Making)

    assert differences(plain(make, loop), ours(make, options, loop)) == []
