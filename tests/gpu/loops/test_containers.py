"""What a model hands to its blocks, and what only their backward uses, on the device of --device.

The programs are those of tests/parity; their tensors are made where activations are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lt_offload
from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import Plan
from tests.gpu.loops.bench import LOOPS, Bench
from tests.gpu.target import ROOM
from tests.parity.reruns import test_containers as containers
from tests.parity.users import test_block_state as states
from tests.support.engines import Result, differences
from tests.support.plans import streamed
from tests.support.profiles import budgets
from tests.support.user_nets import HIDDEN, RUNS, Layer, Net, ordinary, rows

pytestmark = LOOPS

Make = Callable[[torch.device], nn.Module]


MAKES: dict[str, Make] = {
    "counting beside a tensor": lambda device: containers.Handing(
        containers.CountsInTuple, lambda: (torch.full((HIDDEN,), 0.9, device=device), {"i": 0})
    ),
    "loss in a dict, a tensor": lambda device: containers.WITH_TENSORS["loss of a tensor"](),
    "a state, written": lambda device: containers.Through(
        containers.Written, lambda: containers.State(torch.zeros((), device=device), 0.0)
    ),
    "added in place": lambda device: containers.Handing(
        containers.AddsStatistics, lambda: {"load": torch.zeros(HIDDEN, device=device), "means": []}
    ),
    "added in place, on the host": lambda device: _beside_a_weight("dict"),
    "added in place to an argument, on the host": lambda device: _beside_a_weight("argument"),
    "a counter in ctx": lambda device: states.scaled(),
    "a mask that ctx saves": lambda device: Net(_MaskedLayer),
}
ONCE = (
    "added in place",
    "added in place, on the host",
    "added in place to an argument, on the host",
    "a counter in ctx",
    "a mask that ctx saves",
)
"""Runs once under measured plans only."""


class _AddsToArgument(Layer):
    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        given += y.detach().mean((0, 1))
        return y + given


def _beside_a_weight(kind: str) -> nn.Module:
    """Makes a tensor where a weight is: that is on the host between blocks, and on the device in plain PyTorch."""
    layer = _AddsToArgument if kind == "argument" else containers.AddsStatistics
    model = containers.Handing(layer, lambda: None)

    def make() -> Any:
        load = torch.zeros(HIDDEN, device=model.net.head.weight.device)
        return load if kind == "argument" else {"load": load, "means": []}

    model.make = make
    return model


class _OnDevice(torch.autograd.Function):
    """As the one of the host's tests, with a mask on the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        states.SCALES["calls"] += 1
        generator = torch.Generator().manual_seed(states.SCALES["calls"])
        ctx.save_for_backward(torch.rand(x.shape, generator=generator).to(x.device))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        gradient: torch.Tensor = grads[0] * ctx.saved_tensors[0]
        return gradient


class _MaskedLayer(Layer):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = _OnDevice.apply(super().inner(x))  # type: ignore[no-untyped-call]
        return masked


def fresh(make: Make, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def batches(device: torch.device) -> list[dict[str, torch.Tensor]]:
    return [{name: value.to(device) for name, value in row.items()} for row in rows()]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    states.SCALES["calls"] = 0
    torch.manual_seed(5)
    return [loss.cpu() for loss in ordinary(model, optimizer, batches(device))]


def compare(make: Make, plan: Plan | None, budget: str, bench: Bench) -> None:
    """Compare plain training with ours by ``plan``, or by a plan that is measured here for ``budget``."""
    device = bench.device
    model, optimizer = fresh(make, device)
    model.to(device)
    losses = trained(model, optimizer, device)
    model.to("cpu")
    for state in optimizer.state.values():
        state |= {name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)}
    expected, seen = Result(losses, model, optimizer), getattr(model, "seen", [])

    if plan is None:
        model, optimizer = fresh(make, device)
        profile = lt_offload.profile(model, batches(device)[0], optimizer=optimizer, device=device)
        plan = budgets.planned(profile, budget, host_update=False)
    model, optimizer = fresh(make, device)
    # So little memory is less than what PyTorch's allocator takes at a time.
    plan = replace(plan, budget_bytes=ROOM)
    with lt_offload.offloaded(model, optimizer, batches(device)[0], plan=plan, accelerator=bench.target.accelerator):
        losses = trained(model, optimizer, device)
    assert differences(expected, Result(losses, model, optimizer)) == []
    assert seen == getattr(model, "seen", [])


@pytest.mark.parametrize("budget", budgets.BUDGETS)
@pytest.mark.parametrize("name", MAKES)
def test_by_budget(name: str, budget: str, bench: Bench) -> None:
    compare(MAKES[name], None, budget, bench)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", [name for name in MAKES if name not in ONCE])
def test_in_every_run(name: str, options: tuple[str, ...], bench: Bench) -> None:
    model, optimizer = fresh(MAKES[name], bench.device)
    plan = streamed(find_blocks(model), optimizer, options=options, places=("device", "paged"))
    compare(MAKES[name], plan, "", bench)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["dict", "argument"])
def test_without_gradients(kind: str, guard: Callable[[], Any], bench: Bench) -> None:
    """What blocks add to a tensor on the host, as validation does it."""
    device = bench.device
    plain, _ = fresh(lambda _: _beside_a_weight(kind), device)
    model, optimizer = fresh(lambda _: _beside_a_weight(kind), device)
    batch = batches(device)[0]
    with guard():
        expected = plain.to(device)(**batch)["loss"].cpu()
    # It runs once in each iteration, so every plan of it does.
    profile = lt_offload.profile(model, batch, optimizer=optimizer, device=device)
    plan = replace(budgets.planned(profile, "resident"), budget_bytes=ROOM)
    model, optimizer = fresh(lambda _: _beside_a_weight(kind), device)
    with lt_offload.offloaded(model, optimizer, batch, plan=plan, accelerator=bench.target.accelerator), guard():
        assert torch.equal(expected, model(**batch)["loss"].cpu())
