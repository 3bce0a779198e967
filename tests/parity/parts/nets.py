"""Models of users whose blocks have unusual arguments, outputs and habits, and loops that train them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lt_offload
from lt_offload.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.engines import Result
from tests.support.profiles import budgets

WIDTH = 16


class Plain(nn.Module):
    """A layer that treats every sample on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Nested(nn.Module):
    """Takes samples in dictionaries and tuples, a table for all and a mask; returns them so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, given: dict[str, Any], table: Tensor) -> tuple[Tensor, dict[str, Any]]:
        scale, (shift, mask) = given["scale"], given["more"]
        y = torch.tanh(self.inner(x * scale[:, None, None] + shift) + table) * mask
        return x + y, {"scale": scale, "more": (shift + y, mask), "name": "same"}


class Learned(nn.Module):
    """Takes one row that is trained, too, and that every part of every layer is given, and uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x * row) - row)


class Skip(Plain):
    """Takes what an earlier layer has returned, too."""

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return super().forward(x * early) + early


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Mixing(Plain):
    """Attention whose input is [tokens, samples, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(x, x, x, need_weights=False)[0])


class Counting(Plain):
    """Returns a number for its batch beside the samples."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.square().mean()


class Twice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Fixed(Plain):
    """Runs with eight samples only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(8, -1, WIDTH)).reshape(x.shape)


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.row = nn.Parameter(torch.ones(1, 1, WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        given: dict[str, Any] = {"scale": x.mean((1, 2)), "more": (x * 2, (ids > 3)[..., None])}
        early = x * 2
        for layer in self.layers:
            if isinstance(layer, Skip):
                x = layer(x, early)
            elif isinstance(layer, Nested):
                x, given = layer(x, given=given, table=torch.linspace(0, 1, ids.shape[1])[:, None].expand(-1, WIDTH))
            elif isinstance(layer, Learned):
                x = layer(x, self.row)
            elif isinstance(layer, Mixing):
                x = layer(x.transpose(0, 1)).transpose(0, 1)
            else:
                out = layer(x)
                x = out[0] if isinstance(out, tuple) else out
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def net(layer: Callable[[], nn.Module]) -> Net:
    torch.manual_seed(0)
    return Net(layer).train()


def ids(samples: int = 8, tokens: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(20, (samples, tokens), generator=torch.Generator().manual_seed(seed))


def plan_for(profile: Profile, budget: str, *, spare: float = 0.0, **settings: Any) -> Plan:
    """A plan for the smallest budget, one in the middle, or one in which everything stays.

    ``spare``: the part by which the smallest is exceeded, for results that are kept on the device.
    """
    least = budgets.least(profile, **settings)
    memory = {"tight": int((1 + spare) * least), "middle": int(1.6 * least), "resident": 1 << 30}[budget]
    return lt_offload.solve(profile, memory=memory, solver_time_limit=1000, **settings)


def trained(start: nn.Module, micro_batches: int, batches: list[Tensor], *, plainly: bool, **settings: Any) -> Result:
    """Return a copy of ``start`` after a few steps: by the reference, or offloaded."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    context: Any
    if plainly:
        context = lt_offload.micro_batched_reference(model, micro_batches)
    else:
        context = lt_offload.offloaded(
            model, optimizer, (ids(),), micro_batches=micro_batches, accelerator="cpu", **settings
        )
    losses = []
    with context:
        torch.manual_seed(3)
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    return Result(losses, model, optimizer)
