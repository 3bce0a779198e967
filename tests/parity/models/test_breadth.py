"""A few of the models that ``python -m scripts.breadth`` trains, of each family some."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_offload
from scripts.attack.compared import Ended, attacked
from scripts.breadth.models import FAMILIES, compare
from tests.support.engines import make_optimizer
from tests.support.trainers import Stepping, stepped

KINDS = {
    "causal": ("deepseek_v4", "jamba", "gemma4_text", "olmo_hybrid", "llama4"),
    "masked": ("bert", "esm", "deberta-v2", "tapas"),
    # Here with tables of positions in each layer; embeddings used beside their call; layers of two kinds in turn.
    "seq2seq": ("t5", "umt5", "prophetnet", "pegasus_x", "bart"),
    "images": ("vit", "deit", "swin"),
}
LONGER = {
    # Here with skips from the first half to the second, and with embeddings in dictionaries.
    "diffusion": ("hunyuan-dit", "z-image"),
    "sentences": ("bert", "bert by SentenceTransformerTrainer"),
}


def _rows(kinds: dict[str, tuple[str, ...]], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(family, kind, marks=marks) for family in kinds for kind in kinds[family]]


@pytest.mark.parametrize(("family", "kind"), _rows(KINDS) + _rows(LONGER, pytest.mark.slow))
def test_models_train_as_they_are(family: str, kind: str) -> None:
    ended = {run.budget: run for run in compare(family, kind)}
    expected = {"smallest": "equal", "recomputing": "equal"}
    assert {budget: run.outcome for budget, run in ended.items()} == expected | (
        {"from configuration": "planned"} if family == "causal" else {}
    ), ended


def test_families_are_those_of_transformers() -> None:
    assert all(len(family.kinds()) > 20 for family in FAMILIES.values() if family.library == "transformers")


class LeafLayer(nn.Module):
    """Its graph holds a leaf that it makes, as transformers' MRA has it without its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * torch.ones_like(x).requires_grad_()


class Keeping(torch.autograd.Function):
    """Keeps what its backward needs as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 1 - x.tanh() ** 2
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope


class KeepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + Keeping.apply(self.inner(x))  # type: ignore[no-untyped-call]


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Small(nn.Module):
    """Its first layer is given the result of an operation that saves that (RegNet's stem)."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = (x * self.scale).relu()  # a variable that is there until the forward ends
        inner = first
        for layer in self.layers:
            inner = layer(inner)
        return {"loss": self.head(inner.mean(1)).square().mean()}


@pytest.mark.slow
@pytest.mark.own_plan("is about the smallest memory that is named")
@pytest.mark.parametrize("layer", [LeafLayer, KeepingLayer, PlainLayer])
def test_what_a_graph_holds_is_in_the_smallest_memory(layer: type[nn.Module]) -> None:
    def train(ours: dict[str, Any] | None) -> Ended:
        torch.manual_seed(0)
        module = Stepping(Small(layer), partial(make_optimizer, name="adamw"))
        generator = torch.Generator().manual_seed(1)
        batches = [{"x": torch.randn(4, 64, 16, generator=generator)} for _ in range(3)]
        strategy: Any = "auto" if ours is None else lt_offload.OffmateStrategy(solver_time_limit=2.0, **ours)
        found = stepped(strategy, module, batches)
        return Ended.of(found.model, found.optimizer, {"losses": found.losses}, getattr(strategy, "plan", None))

    runs = list(attacked(train, ("smallest", "recomputing")))
    assert [run.outcome for run in runs] == ["equal", "equal"], runs
