"""Parameters without elements, in one storage, or used for some shapes only: the same numbers as plain training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_offload import Plan
from lt_offload.model.blocks import Structure, find_blocks
from tests.support import plans, user_nets
from tests.support.engines import differences, installed
from tests.support.trials import Trial

WIDTH = 32


class Layer(nn.Module):
    """``kind``: of its odd parameter; ``long`` and ``short`` are used for batches above and up to 2 rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind.startswith("empty"):
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        if kind in ("long", "short"):
            self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.kind == "empty and used":
            return y + self.empty.sum(0)
        if self.kind == ("long" if x.shape[0] > 2 else "short"):
            return y + self.extra(x)
        return y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)
        if kind == "one storage":
            flat = torch.randn(4, WIDTH, WIDTH) / 8
            for layer, matrix in zip(self.layers, flat, strict=True):
                layer.linear.weight = nn.Parameter(matrix)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), y)}


def batches(kind: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = (8, 2, 8, 2, 3, 8) if kind in ("long", "short") else (8, 8, 8)
    return [
        {"x": torch.randn(n, 8, generator=generator), "y": torch.randint(4, (n,), generator=generator)} for n in sizes
    ]


KINDS = ("empty", "empty and used", "one storage", "long", "short")
TRIALS = {kind: Trial(partial(Model, kind), partial(batches, kind)) for kind in KINDS}


@pytest.mark.parametrize("planner", ["memferry", "l2l", "resident"])
@pytest.mark.parametrize("kind", KINDS)
def test_planned(kind: str, planner: Any) -> None:
    memory = "10MB" if planner == "resident" else "90kB"
    assert TRIALS[kind].differences(memory=memory, planner=planner) == []


def trained(kind: str, places: Callable[[Structure], Sequence[str]], *options: str) -> Plan:
    """Compare plain training with that by a plan in which everything travels, and return that plan."""
    model = TRIALS[kind].model()
    optimizer, structure = user_nets.adamw(model), find_blocks(model)
    plan = plans.streamed(structure, optimizer, options=options, places=places(structure))
    with installed(model, optimizer, plan) as engine:
        result = TRIALS[kind].run(model, optimizer)
        engine.drain()
    assert differences(TRIALS[kind].plain, result) == []
    return plan


@pytest.mark.parametrize("place", ["device", "paged", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_travels(kind: str, place: str) -> None:
    trained(kind, lambda _: (place,), "keep", "recompute", "offload", "mixed", "reload")


@pytest.mark.parametrize("kind", ["long", "short"])
def test_gradients_that_do_not_come_leave_their_place_to_others(kind: str) -> None:
    """On the host, all arrive at one address; those that the layers send are for some batches missing altogether."""
    plan = trained(kind, lambda found: ["device" if "linear" in name else "host" for name, _ in found.tensors], "keep")
    copies = [op for op in plan.ops if op.payload == "grad"]
    assert len(copies) == 6
    assert {plan.groups[op.groups[0]].host_offset for op in copies} == {0}


class Sparse(user_nets.Layer):
    """Adds a sparse matrix, whose numbers are trained, to a weight (as PEFT's SHiRA), and multiplies with such."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(40))
        self.where: Tensor
        self.register_buffer("where", torch.stack([torch.arange(40) % user_nets.HIDDEN, torch.arange(40) // 2]))

    def inner(self, x: Tensor) -> Tensor:
        shape = torch.Size((user_nets.HIDDEN, user_nets.HIDDEN))
        trained = torch.sparse_coo_tensor(self.where, self.numbers, shape, check_invariants=False)
        scaled = torch.sparse_coo_tensor(self.where, 0.5 * self.numbers, shape, check_invariants=False)
        weight = torch.sparse.mm(trained, self.linear.weight) + scaled
        return torch.tanh(x @ weight.t())


@user_nets.with_every_budget
def test_sparse_tensors_within_blocks(budget: str) -> None:
    make = partial(user_nets.Net, Sparse)
    assert differences(user_nets.plain(make), user_nets.by_budget(make, budget)) == []


@user_nets.in_every_run
def test_sparse_tensors_in_blocks_that_run_again(options: tuple[str, ...]) -> None:
    make = partial(user_nets.Net, Sparse)
    assert differences(user_nets.plain(make), user_nets.ours(make, options)) == []
