"""A small net with places for users' code; trained plainly, by the engine in a loop of one's own, and by budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_offload
from lt_offload import Plan, Profile
from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from tests.support import plans
from tests.support.engines import Result, installed
from tests.support.profiles import budgets
from tests.support.profiles.budgets import BUDGETS

RUNS = {
    "recorded": ("keep", "offload"),
    "run again": ("recompute", "mixed", "reload"),
    "both": ("recompute", "keep", "mixed", "offload"),
}
"""Options of a plan's blocks, in turn."""

HIDDEN, VOCAB = 32, 61

in_every_run = pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
recorded_or_run_again = pytest.mark.parametrize(
    "options", [RUNS["recorded"], RUNS["run again"]], ids=["recorded", "run again"]
)
with_every_budget = pytest.mark.parametrize("budget", BUDGETS)


class Layer(nn.Module):
    """A residual layer that uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Net(nn.Module):
    """Embedding, layers and head with a loss; ``between`` and ``after`` are what a case adds."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, **hooks: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.after: Callable[..., Tensor] = hooks.get("after", lambda net, loss, hidden: loss)
        self.context: Callable[[], Any] = hooks.get("context", nullcontext)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with self.context():
            x = self.embed(ids)
            hidden: list[Tensor] = []
            for layer in self.layers:
                x = layer(x)
                if self.after is deep_supervision:
                    hidden.append(x)
            logits = self.head(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            return {"loss": self.after(self, loss, hidden)}


def deep_supervision(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    return loss + sum(h.square().mean() for h in hidden)


def rows(steps: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(VOCAB, (2, 6), generator=generator) for _ in range(steps)]
    return [{"ids": ids, "labels": ids.roll(1, 1)} for ids in made]


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - that it is global is the point


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


Loop = Callable[[nn.Module, torch.optim.Optimizer, list[dict[str, Tensor]]], list[Tensor]]


def ordinary(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Tensor]],
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    losses = []
    for batch in batches:
        with around_forward():
            loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def plain(make: Callable[[], nn.Module], loop: Loop = ordinary) -> Result:
    model = make()
    optimizer = adamw(model)
    seed()
    return Result(loop(model, optimizer, rows()), model, optimizer)


@contextmanager
def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer, options: tuple[str, ...]) -> Iterator[Engine]:
    """An engine in a loop of our own, with a plan that streams everything and has every place for updates."""
    structure = find_blocks(model)
    plan = plans.streamed(structure, optimizer, options=options, places=("device", "host", "paged"))
    with installed(model, optimizer, plan) as engine:
        yield engine


def ours(make: Callable[[], nn.Module], options: tuple[str, ...], loop: Loop = ordinary) -> Result:
    model = make()
    optimizer = adamw(model)
    with engine_of(model, optimizer, options):
        seed()
        losses = loop(model, optimizer, rows())
    return Result(losses, model, optimizer)


@cache
def measured(make: Callable[[], nn.Module]) -> Profile:
    """The profile of a net; once for all tests of ``make``."""
    model = make()
    return lt_offload.profile(model, rows()[0], optimizer=adamw(model))


@cache
def planned(make: Callable[[], nn.Module], budget: str) -> Plan:
    """A plan for a budget; made once, too."""
    return budgets.planned(measured(make), budget)


def by_budget(make: Callable[[], nn.Module], budget: str, loop: Loop = ordinary) -> Result:
    """The public way: measured, planned, and carried out."""
    model = make()
    optimizer = adamw(model)
    with lt_offload.offloaded(model, optimizer, rows()[0], plan=planned(make, budget), accelerator="cpu"):
        seed()
        losses = loop(model, optimizer, rows())
    return Result(losses, model, optimizer)


def refusal(make: Callable[[], nn.Module]) -> str:
    """The error of the profile, which comes before any training."""
    model = make()
    with pytest.raises(UnsupportedError) as caught:
        lt_offload.profile(model, rows()[0], optimizer=adamw(model))
    return str(caught.value)


def fault(options: tuple[str, ...], loop: Loop, make: Callable[[], nn.Module] = Net) -> str:
    """The error that a loop ends with."""
    with pytest.raises(UnsupportedError) as caught:
        ours(make, options, loop)
    return str(caught.value)


def between(act: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Loop:
    """A loop that does something between the backward and the step."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        for batch in batches:
            model(**batch)["loss"].backward()
            act(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


def changing(act: Callable[[Any, torch.optim.Optimizer], Any]) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        losses = ordinary(model, optimizer, batches[:2])
        act(model, optimizer)
        return losses + ordinary(model, optimizer, batches[2:])

    return loop
