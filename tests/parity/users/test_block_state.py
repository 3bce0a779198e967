"""Random numbers, buffers and counters that a block changes: a second run sees what the first saw, or is refused."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_offload
from lt_offload.model.blocks import find_blocks
from tests.support import plans
from tests.support.engines import Result, differences, installed
from tests.support.user_nets import (
    HIDDEN,
    Layer,
    Net,
    adamw,
    by_budget,
    fault,
    in_every_run,
    ordinary,
    ours,
    plain,
    refusal,
    rows,
    seed,
    with_every_budget,
)


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(HIDDEN)

    def inner(self, x: Tensor) -> Tensor:
        return self.batch(super().inner(x).transpose(1, 2)).transpose(1, 2)


class Spectral(Layer):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, [0.0]

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.history[-1] + 0.1)
        return super().inner(x) * (1 + 0.1 * self.calls) + self.history[-1]


class Drawing(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * random.random() + float(np.random.rand())  # noqa: NPY002


class OwnGenerators(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
        self.numpy = np.random.default_rng(3)

    def inner(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.torch) * self.python.random() + float(self.numpy.random())
        return super().inner(x) * noise


class Nested(Layer):
    """Has generators in a tuple and a history in a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1), [random.Random(2)]
        self.seen: dict[str, list[float]] = {"means": [0.0]}

    def inner(self, x: Tensor) -> Tensor:
        generator, (python,) = self.own
        self.seen["means"].append(self.seen["means"][-1] + python.random())
        return super().inner(x) * torch.rand(x.shape, generator=generator) + self.seen["means"][-1]


class Queueing(Layer):
    """Has its history in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[float] = deque([0.0], maxlen=2)

    def inner(self, x: Tensor) -> Tensor:
        self.seen.append(self.seen[-1] + 0.1)
        return super().inner(x) + sum(self.seen)


class Assigning(Layer):
    """Replaces a buffer instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def inner(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return super().inner(x - self.mean)


class Late(Counting):
    """Begins to count long after the first pass."""

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) if self.torch_calls() > 2 else Layer.inner(self, x)

    def torch_calls(self) -> int:
        self.passes = getattr(self, "passes", 0) + 1
        return self.passes


class OfHelper(Layer):
    """Counts in an object that a module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(calls=0)

    def inner(self, x: Tensor) -> Tensor:
        self.helper.calls += 1
        return super().inner(x) + 0.01 * self.helper.calls


class OfTensor(Layer):
    """State in a tensor that is a plain attribute, and a generator of NumPy's old kind."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.noise = torch.zeros(HIDDEN), np.random.RandomState(3)  # noqa: NPY002

    def inner(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().inner(x - self.average) + float(self.noise.rand())


@in_every_run
@pytest.mark.parametrize(
    "layer",
    [Normed, Spectral, Counting, Drawing, OwnGenerators, Nested, Queueing, Assigning, Late, OfHelper, OfTensor],
    ids=lambda c: c.__name__,
)
def test_state_that_a_block_changes(layer: type[nn.Module], options: tuple[str, ...]) -> None:
    def make() -> Net:
        return Net(layer)

    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.layers, found.model.layers, strict=True):  # type: ignore[arg-type]
        assert vars(left).get("calls") == vars(right).get("calls")
        assert vars(left).get("history") == vars(right).get("history")
        assert vars(left).get("seen") == vars(right).get("seen")
        assert vars(left).get("helper") == vars(right).get("helper")


@in_every_run
def test_another_mode_before_the_backward(options: tuple[str, ...]) -> None:
    class Dropping(Layer):
        def inner(self, x: Tensor) -> Tensor:
            return F.dropout(super().inner(x), 0.5, self.training)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        for batch in batches:
            loss = model.train()(**batch)["loss"]
            model.eval()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [torch.rand(1)]

    def make() -> Net:
        return Net(Dropping)

    found = ours(make, options, loop)
    assert differences(plain(make, loop), found) == []
    assert not any(module.training for module in found.model.modules())


class ByMode(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * (2 if torch.is_grad_enabled() else 1)


class LittleMore(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) + (0.0 if torch.is_grad_enabled() else 1e-3)


class Frozen(Layer):
    """In evaluation mode torch's attention is another kernel without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, batch_first=True).eval()

    def train(self, mode: bool = True) -> Layer:
        super().train(mode)
        self.attention.eval()
        return self

    def inner(self, x: Tensor) -> Tensor:
        return self.attention(super().inner(x))


COUNTS = {"calls": 0}
SCALES = {"calls": 0}


class Scaled(torch.autograd.Function):
    """Has a gradient that depends on how often it was called, and an output that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SCALES["calls"] += 1
        ctx.scale = 1 + 0.1 * SCALES["calls"]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        gradient: Tensor = grads[0] * ctx.scale
        return gradient


class OwnScaled(Layer):
    def inner(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scaled.apply(super().inner(x))  # type: ignore[no-untyped-call]
        return scaled


def scaled() -> Net:
    return Net(OwnScaled)


@with_every_budget
def test_what_only_a_backward_uses(budget: str) -> None:
    """Both runs of such a block have the same outputs: what its graph keeps tells, and it runs once."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        SCALES["calls"] = 0
        return ordinary(model, optimizer, batches)

    assert differences(plain(scaled, loop), by_budget(scaled, budget, loop)) == []


class OfGlobals(Layer):
    def inner(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return super().inner(x) + 0.01 * COUNTS["calls"]


class WritingItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


@pytest.mark.parametrize(
    ("layer", "said"), [(OfGlobals, "gave other numbers when it ran again"), (WritingItsInput, "block layers.0")]
)
def test_blocks_that_a_second_run_would_change_are_refused_before_training(layer: type[nn.Module], said: str) -> None:
    assert said in refusal(lambda: Net(layer))


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("option", ["keep", "recompute", "reload", "offload"])
def test_a_block_with_other_numbers_without_a_graph_under_every_option(option: str, frozen: int) -> None:
    def make() -> nn.Module:
        net = Net(LittleMore)
        for part in [net.embed, *net.layers][:frozen]:
            part.requires_grad_(False)
        return net

    model = make()
    optimizer = adamw(model)
    profile = lt_offload.profile(model, rows()[0], optimizer=optimizer)
    made = plans.streamed(find_blocks(model), optimizer, options=[option], places=("device", "host", "paged"))
    graphed = tuple(at for at, block in enumerate(profile.blocks) if block.graphed)
    with installed(model, optimizer, replace(made, graphed=graphed)):
        seed()
        losses = ordinary(model, optimizer, rows())
    assert differences(plain(make), Result(losses, model, optimizer)) == []


class Swaying(Layer):
    """Computes more, less or something else in the second run of its second iteration."""

    how = ""

    def inner(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += bool(self.how)
        if not self.how or COUNTS["calls"] <= 3:
            return super().inner(x)
        return {
            "more": lambda: super(Swaying, self).inner(self.linear(x)),
            "less": lambda: x,
            "other": lambda: torch.bmm(x, self.linear.weight.expand(2, -1, -1)),
        }[self.how]()


@pytest.mark.parametrize("how", ["more", "less", "other"])
def test_a_second_run_that_computes_something_else_is_refused(how: str) -> None:
    def make() -> Net:
        net = Net(Swaying)
        net.layers[1].how = how  # type: ignore[assignment]
        COUNTS["calls"] = 0
        return net

    assert "a block" in fault(("mixed",), ordinary, make)


class Hooking(Layer):
    """Cannot do without a graph: a tensor hook, and a gradient that is kept."""

    def inner(self, x: Tensor) -> Tensor:
        out = super().inner(x)
        out.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        out.retain_grad()
        return out


class Differentiating(Layer):
    """Uses a gradient as an activation."""

    def inner(self, x: Tensor) -> Tensor:
        energy = super().inner(x).square().sum()
        return super().inner(x) + torch.autograd.grad(energy, x, create_graph=True)[0]


class Permuting(Layer):
    """Saves two buffers for its backward, as PEFT's BOFT does; they are on the device all the time."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in ("before", "after"):
            order = torch.randperm(HIDDEN, generator=generator)
            self.register_buffer(name, torch.eye(HIDDEN)[order])

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x @ self.before) @ self.after


class Skipping(Layer):
    """Is left out at random, so that a step may take more than the one that is measured."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.6 else super().forward(x)


@with_every_budget
@pytest.mark.parametrize(
    "layer",
    [ByMode, LittleMore, Frozen, Hooking, Differentiating, Permuting, Skipping],
    ids=lambda layer: layer.__name__,
)
def test_habits_of_blocks_are_planned_for(layer: type[nn.Module], budget: str) -> None:
    """Other numbers without a graph, the need of one, and more memory in some steps than in the measured one."""
    make = NETS.setdefault(layer, partial(Net, layer))
    assert differences(plain(make), by_budget(make, budget)) == []


NETS: dict[type[nn.Module], Callable[[], nn.Module]] = {}
"""One per layer, so that each is measured once."""
