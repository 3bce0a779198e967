"""Contexts around the step, and a frozen teacher beside the model: the numbers, and fast paths, of plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from lt_offload.machine.accounting import Account
from lt_offload.machine.dispatch import DISPATCH_MODES, WatchingMode
from tests.support.engines import differences
from tests.support.user_nets import (
    HIDDEN,
    RUNS,
    VOCAB,
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


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized() -> Net:
    net = Net(Attending, context=parametrize.cached)
    for layer in net.layers:
        parametrize.register_parametrization(layer.linear, "weight", Doubled())
    return net


@in_every_run
def test_parametrized_weights_that_are_kept(options: tuple[str, ...]) -> None:
    assert differences(plain(parametrized), ours(parametrized, options)) == []


@with_every_budget
def test_parametrized_weights_that_are_kept_are_planned_for(budget: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        losses = []
        for batch in batches:
            with parametrize.cached():
                losses += ordinary(model, optimizer, [batch])
        return losses

    assert differences(plain(parametrized, loop), by_budget(parametrized, budget, loop)) == []


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


def test_a_parametrized_weight_of_two_blocks_that_is_kept_is_refused() -> None:
    def make() -> Net:
        net = parametrized()
        net.layers[1].linear = net.layers[0].linear  # type: ignore[union-attr]
        return net

    message = refusal(make)
    assert "weight layers.0.linear.parametrizations.weight.original of blocks layers.0 and layers.1" in message
    assert "leave out cached()" in message


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


# -- a frozen teacher in eval mode -------------------------------------------------------------------------------------


class Attention(nn.MultiheadAttention):
    """Self-attention, called as a layer is."""

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False)[0]


class Distilled(Net):
    """Learns from a teacher that is a part of it, or from one that is not."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 64, batch_first=True)
        middle = nn.ModuleList([Attention(HIDDEN, 4, batch_first=True), layer, nn.TransformerEncoder(layer, 2)])
        teacher = nn.ModuleList([nn.Embedding(VOCAB, HIDDEN), middle, nn.Linear(HIDDEN, VOCAB)])
        teacher.requires_grad_(False).eval()
        self.teacher: Any = teacher if part else tuple(teacher)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        embed, layers, head = self.teacher
        with torch.no_grad():
            x = embed(ids)
            for layer in layers:
                x = layer(x, src_key_padding_mask=ids > 50)
            target = head(x).softmax(-1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.kl_div(self.head(x).log_softmax(-1), target, reduction="batchmean")}


class InLowPrecision(Distilled):
    """The same, with products in bfloat16: torch's fast paths call operations that autocast has to see."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().forward(ids, labels)


BESIDE = partial(Distilled, part=False)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@with_every_budget
def test_a_frozen_teacher_gives_plain_numbers(budget: str) -> None:
    assert differences(plain(BESIDE), by_budget(BESIDE, budget)) == []


def test_a_teacher_under_autocast_gives_plain_numbers() -> None:
    make = partial(InLowPrecision, part=False)
    assert differences(plain(make), ours(make, RUNS["both"])) == []


@in_every_run
def test_a_teacher_that_is_part_of_the_model(options: tuple[str, ...]) -> None:
    make = partial(Distilled, part=True)
    assert differences(plain(make), ours(make, options)) == []


class Theirs(TorchFunctionMode):
    """A user's own mode, which does count."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_only_the_engines_modes_are_left_out() -> None:
    original, x = torch.overrides.has_torch_function, (torch.ones(1),)
    seen: list[bool] = []
    one, two = Theirs(), Theirs()
    watching = WatchingMode()
    with one:
        watching.place()
        with two:
            assert torch.overrides.has_torch_function(x)
        assert torch.overrides.has_torch_function(x)
        assert watching.lift() == 0
    assert not original(x)
    assert torch.overrides.has_torch_function is original
    watching.place()
    thread = threading.Thread(target=lambda: seen.append(torch.overrides.has_torch_function(x)))
    thread.start()
    thread.join()
    assert original(x)
    assert not torch.overrides.has_torch_function(x)
    assert seen == [False]
    assert watching.lift() == 0
    assert watching.lift() is None
    assert torch.overrides.has_torch_function is original


def test_nothing_is_left_behind() -> None:
    original = torch.overrides.has_torch_function
    ours(Net, RUNS["both"])
    assert torch.overrides.has_torch_function is original


class Filling(Layer):
    """Has operations whose gradient torch computes in another way within a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.3))

    def inner(self, x: Tensor) -> Tensor:
        filled = x.masked_fill(x.detach() > 0.5, self.value)
        return super().inner(filled) * filled.sigmoid().unflatten(-1, (8, 4)).prod(-1).repeat(1, 1, 4)


def with_a_product(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    return torch.stack([loss.exp(), loss.sin() + 2, loss.cos() + 3, loss.tanh()]).prod()


@with_every_budget
def test_gradients_that_torch_computes_otherwise_within_modes(budget: str) -> None:
    make = partial(Net, Filling, after=with_a_product)
    assert differences(plain(make), by_budget(make, budget)) == []


@in_every_run
def test_gradients_that_torch_computes_otherwise_within_modes_by_hand_made_plans(options: tuple[str, ...]) -> None:
    make = partial(Net, Filling, after=with_a_product)
    assert differences(plain(make), ours(make, options)) == []


def test_a_node_that_asks_for_modes_finds_them_again_when_it_has_run() -> None:
    seen: list[int] = []
    x = torch.arange(1.0, 5.0, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: seen.append(DISPATCH_MODES.size()))
    with Account():
        y.prod().backward()
    assert seen == [1]
