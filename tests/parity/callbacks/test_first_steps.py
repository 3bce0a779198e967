"""First steps that are unlike those that follow: without a loss, with frozen blocks, with a forward that is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_offload import OffmateStrategy
from lt_offload.profiling.step.first import FirstStep
from lt_offload.strategy.first import sample
from tests import sampling
from tests.support.trainers import Module, budgets, differences, fit


class NoLoss(Module):
    """Has no loss for its first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_step == 0 and batch_idx == 0 else loss


class Dropped(Module):
    """Calls the model once more, for nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(input_ids=batch["input_ids"])
        return super().training_step(batch, batch_idx)


class Probe(Module):
    """Trains a layer of its own behind a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.probe = nn.Linear(self.model.config.vocab_size, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss: Tensor = self.probe(logits[:, -1]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.probe.parameters(), lr=1e-2)


class TwoSteps(torch.optim.AdamW):
    """Calls the closure itself, and the step of its base class, around both of which torch calls hooks."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        super().step()
        return loss


class OwnOptimizer(Module):
    def configure_optimizers(self) -> Any:
        torch.optim.AdamW([torch.zeros(1)])  # from then on hooks are called around the base's step, too
        return TwoSteps(self.parameters(), lr=1e-2, foreach=False)


class Unused(nn.Module):
    """Has larger layers than those that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.unused = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.embed = nn.Embedding(97, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 97)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Elsewhere(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Unused()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = self.model(batch["input_ids"], batch["input_ids"])["loss"]
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation.append(self.model(batch["input_ids"], batch["input_ids"])["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


CLIPPED = {"gradient_clip_val": 0.1}
WINDOW = {"accumulate_grad_batches": 2}
CASES: dict[str, tuple[type[Module], dict[str, Any]]] = {
    "no loss, clipped": (NoLoss, CLIPPED),
    "a forward is dropped": (Dropped, {}),
    "a forward is dropped in a window": (Dropped, WINDOW),
    "a probe": (Probe, {}),
    "a probe, clipped, in a window": (Probe, CLIPPED | WINDOW),
    "an optimizer of its own": (OwnOptimizer, CLIPPED),
    "other layers": (Elsewhere, {}),
    "other layers, clipped": (Elsewhere, CLIPPED),
    "other layers in a window": (Elsewhere, WINDOW),
}


def seeded(kind: type[Module]) -> Module:
    L.seed_everything(7, verbose=False)
    return kind()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("case", sampling.some([*CASES], 5))
def test_they_equal_stock_and_lead_to_a_plan(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings = CASES[case]
    made: list[FirstStep] = []
    begin = FirstStep.__init__

    def counted(first: FirstStep, *args: Any, **options: Any) -> None:
        made.append(first)
        begin(first, *args, **options)

    monkeypatch.setattr(FirstStep, "__init__", counted)
    if not (kind is Elsewhere and settings == WINDOW):  # whose gradients have to be added up
        monkeypatch.setattr(sample, "measure", lambda *_, **__: pytest.fail("a step runs aside"))
    stock = fit("auto", seeded(kind), **settings)
    strategy = OffmateStrategy(memory="200MB")
    ours = fit(strategy, seeded(kind), **settings)
    assert differences(stock, ours) == []
    assert strategy.plan is not None
    assert len(made) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a forward is dropped", "an optimizer of its own"])
def test_they_equal_stock_in_little_memory(case: str) -> None:
    kind, settings = CASES[case]
    stock = fit("auto", seeded(kind), **settings)
    for memory in budgets(seeded(kind).model):
        twice = 2 * memory if kind is Dropped else memory
        for offloads in (True, False):
            strategy = OffmateStrategy(memory=twice, activation_offload=offloads)
            assert differences(stock, fit(strategy, seeded(kind), **settings)) == []
