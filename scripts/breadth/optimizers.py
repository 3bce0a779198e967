"""The optimizers of a package, each on a small model in a loop: ``pip install --no-deps pytorch_optimizer``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lt_offload
from scripts.attack.compared import Ended

PACKAGE = "pytorch_optimizer"
_STEPS, _WIDTH, _WORDS = 4, 24, 61
Make = Callable[[nn.Module], Optimizer]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _batch(seed: int) -> Tensor:
    return torch.randint(0, _WORDS, (3, 7), generator=torch.Generator().manual_seed(seed))


@cache
def _classes() -> dict[str, type[Optimizer]]:
    import pytorch_optimizer

    classes = map(pytorch_optimizer.load_optimizer, sorted(pytorch_optimizer.get_supported_optimizers()))
    return {cls.__name__: cls for cls in classes}


def kinds() -> list[str]:
    """Return the names of the optimizers."""
    return list(_classes())


def _makers(cls: Any) -> Iterator[Make]:
    """Yield the ways to make an optimizer with its defaults: of all parameters, and of matrices and others apart."""

    def apart(model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        made: Optimizer = cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])
        return made

    yield lambda model: cls(model.parameters())
    yield lambda model: cls(model.parameters(), lr=1e-3)
    yield apart
    yield lambda model: cls(model)
    yield lambda model: cls(model.parameters(), num_iterations=_STEPS)


@cache
def _maker(kind: str) -> Make:
    """Return the first way in which plain PyTorch trains; raises what the first of all has raised."""
    errors = []
    for make in _makers(_classes()[kind]):
        try:
            _trained(make, None)
        except Exception as error:  # made or used in another way, which its documentation tells
            errors.append(error)
        else:
            return make
    raise errors[0]


def trained(kind: str, ours: dict[str, Any] | None) -> Ended:
    """Train; with our engine if there are ``ours``, its settings."""
    return _trained(_maker(kind), ours)


def _trained(make: Make, ours: dict[str, Any] | None) -> Ended:
    model, losses = _Net(), []
    optimizer = make(model)
    context: Any = contextlib.nullcontext()
    if ours is not None:
        context = lt_offload.offloaded(model, optimizer, _batch(0), accelerator="cpu", solver_time_limit=1.0, **ours)
    with context as engine:
        torch.manual_seed(5)
        for seed in range(_STEPS):
            loss = model(_batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return Ended.of(model, optimizer, {"losses": losses}, getattr(engine, "plan", None))
