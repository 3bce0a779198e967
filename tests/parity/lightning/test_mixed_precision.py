"""bf16-mixed under a Trainer: fp32 weights, operations that autocast, the numbers of stock Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from tests import sampling
from tests.support.profiles.budgets import BUDGETS, named_by, planning
from tests.support.trainers import Forced, Run, differences, fit, seeded_module
from tests.support.user_nets import Net, rows
from tests.unit.profiling.test_grad_mode import Attending, ComputedWeight, Mixing

MODELS: list[dict[str, Any]] = [
    {"dropout": 0.1},
    {"dropout": 0.1, "lora": True},
    {"family": "llama-tied"},
    {"family": "bloom", "dropout": 0.1},
    {"family": "phi"},
]


def mixed(strategy: Any, options: dict[str, Any], **settings: Any) -> Run:
    return fit(strategy, seeded_module(**options), **{"precision": "bf16-mixed"} | settings)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_every_option_and_place_equals_stock(options: dict[str, Any]) -> None:
    stock = mixed("auto", options)
    assert differences(stock, mixed(Forced(), options)) == []
    assert not torch.equal(stock.module.losses[0], fit("auto", seeded_module(**options)).module.losses[0])


def smallest_budget(options: dict[str, Any], budget: str) -> int:
    strategy = OffmateStrategy(memory="20KB", **planning(budget) | {"planner": "auto"})
    return named_by(lambda: mixed(strategy, options))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "budget"), sampling.grid(MODELS, list(BUDGETS)), ids=str)
def test_every_budget_equals_stock(options: dict[str, Any], budget: str) -> None:
    memory = int(smallest_budget(options, budget) * BUDGETS[budget])
    strategy = OffmateStrategy(memory=memory, **planning(budget))
    ours = mixed(strategy, options)
    assert differences(mixed("auto", options), ours) == []
    assert strategy.plan is not None
    assert strategy.trace is not None
    # The casts of weights are in the profile, so that what a plan predicts is what a run takes.
    assert strategy.trace.device_peak <= memory
    assert strategy.trace.device_peak == pytest.approx(strategy.plan.predicted.device_peak_bytes, rel=0.05)


class Called(lightning.pytorch.LightningModule):
    """Its blocks may call other operations without gradients than with them."""

    def __init__(self, layer: type[torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = Net(layer)
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(rows(), batch_size=None)


def trained(strategy: Any, layer: type[torch.nn.Module], precision: str) -> Called:
    module: Called = fit(strategy, Called(layer), precision=precision, max_epochs=1).module
    return module


GRAPHED = [
    (Attending, "bf16-mixed"),
    (Mixing, "bf16-mixed"),
    (ComputedWeight, "32-true"),
    (ComputedWeight, "bf16-true"),
]


@pytest.mark.own_plan("whether blocks run again is up to the budget", budget=20.0)
@pytest.mark.parametrize(
    ("layer", "precision", "budget"),
    [(*row, 1.02) for row in GRAPHED] + [(Attending, "32-true", 1.02), (Mixing, "bf16-mixed", 20.0)],
)
def test_blocks_that_call_others_without_gradients(layer: Any, precision: str, budget: float) -> None:
    settings = {"activation_offload": False, "planner": "auto" if budget < 2 else "resident"}
    least = named_by(lambda: trained(OffmateStrategy(memory="1KB", **settings), layer, precision))
    strategy = OffmateStrategy(memory=int(least * budget), **settings)
    ours, stock = trained(strategy, layer, precision), trained("auto", layer, precision)
    assert len(ours.losses) == 4
    assert all(map(torch.equal, ours.losses, stock.losses))
    assert all(map(torch.equal, ours.state_dict().values(), stock.state_dict().values()))
    assert strategy.plan is not None
    assert set(strategy.plan.graphed) == (set(range(1, 5)) if (layer, precision) in GRAPHED else set())
    assert ("recompute" in strategy.plan.options) == (budget < 2)


def test_under_pytorch_lightning() -> None:
    runs = [
        fit(strategy, L=pytorch_lightning, max_epochs=1, precision="bf16-mixed")
        for strategy in ("auto", OffmateStrategy(memory="200MB"))
    ]
    assert differences(*runs) == []


def test_lightnings_own_plugin_is_honoured() -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    ours = fit(OffmateStrategy(memory="200MB"), max_epochs=1, plugins=[plugin])
    assert ours.trainer.precision_plugin is plugin
    assert differences(fit("auto", max_epochs=1, precision="bf16-mixed"), ours) == []
