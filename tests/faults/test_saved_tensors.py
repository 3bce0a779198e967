"""Defects in what happens to saved tensors and new states, on models where nothing else would notice them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from tests.support import plans
from tests.support.engines import BUDGET, Result, differences
from tests.support.hostile.device import HostileDevice

WIDTH = 32
Make = Callable[[], nn.Module]


class Fused(nn.Module):
    """Three matrices in one weight, each used through a view that begins elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.weight.split(WIDTH)
        return linear(torch.tanh(linear(x, second)), third) + x @ first.t()


class Writing(nn.Module):
    """Writes to its input, or to the result of its product, before it is done; or leaves that to the model."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.add(1))
        if self.where == "result":
            y.mul_(2)
        if self.where == "input":
            x.mul_(2)
        return torch.tanh(y) * 3


class Model(nn.Module):
    def __init__(self, layer: Make, where: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            out = layer(x)
            if self.where == "after":
                x.mul_(2)
            x = out
        return x.square().mean()


def fused() -> nn.Module:
    return Model(Fused)


def writing(where: str) -> Make:
    return lambda: Model(lambda: Writing(where), where)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Its state begins as a clone of the gradient, which no factory function makes."""
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)


def trained(
    make: Make, optimizer_of: Any, option: str | None = None, place: str = "device", mode: str = "lazy"
) -> Result:
    """Three steps, plainly without an option."""
    model = make()
    optimizer = optimizer_of(model)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())

    if option is None:
        for _ in range(3):
            step()
        return Result(losses, model, optimizer)
    structure = find_blocks(model)
    plan = plans.streamed(structure, optimizer, options=(option,), places=(place,))
    device = HostileDevice(BUDGET, mode=mode, check=True, poison=True)  # type: ignore[arg-type]
    engine = Engine(model, optimizer, plan, device, structure=structure)
    engine.install()
    try:
        for _ in range(3):
            with engine.iteration():
                step()
        engine.drain()
    finally:
        engine.remove()
        device.close()
    return Result(losses, model, optimizer)


def differ(make: Make, optimizer_of: Any, option: str, place: str = "device") -> bool:
    return differences(trained(make, optimizer_of), trained(make, optimizer_of, option, place)) != []


# -- the offset of a view of a weight ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["keep", "offload"])
def test_views_in_the_middle_of_a_weight(option: str) -> None:
    assert not differ(fused, adamw, option)


# -- states that the first update on the device makes -----------------------------------------------------------------


@pytest.mark.parametrize("place", ["device", "paged"])
def test_states_that_begin_as_something_else_than_a_constant(place: str) -> None:
    assert not differ(fused, momentum, "keep", place)


# -- saved tensors that are written to --------------------------------------------------------------------------------

WRITTEN = [
    ("input", "recompute"),
    ("input", "reload"),
    ("input", "mixed"),
    ("after", "recompute"),
    ("after", "reload"),
    ("after", "mixed"),
    ("result", "mixed"),
]


@pytest.mark.parametrize("mode", ["lazy", "random"])
@pytest.mark.parametrize(("where", "option"), WRITTEN)
def test_what_will_be_used_again_must_not_be_written_to(where: str, option: str, mode: str) -> None:
    trained(writing(where), adamw)  # plainly nothing is wrong with it
    with pytest.raises(UnsupportedError, match="was written to"):
        trained(writing(where), adamw, option, mode=mode)


@pytest.mark.parametrize("option", ["recompute", "reload", "keep", "offload"])
def test_results_may_be_written_to_where_they_are_made_again(option: str) -> None:
    assert not differ(writing("result"), adamw, option)
