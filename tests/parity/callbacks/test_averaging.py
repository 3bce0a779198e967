"""Averages of weights, kept by Lightning's callbacks and by users' own: the offmate strategy against the stock one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from lt_offload.errors import UnsupportedError
from tests import sampling
from tests.support.engines import equal
from tests.support.trainers import budgets, differences, fit, seeded_module, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
]

OPTIONS: dict[str, Any] = {"layers": 4, "dropout": 0.1}


def monthly() -> Any:
    return EMAWeightAveraging(decay=0.9, update_starting_at_epoch=0, update_every_n_steps=2, use_buffers=False)


AVERAGES: dict[str, Callable[[], Any]] = {
    "mean": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.9, update_starting_at_step=1, device="cpu"),
    "ema, sometimes": monthly,
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=2),
}


def averaged(callback: Any) -> list[Tensor]:
    """Return the average that a callback of Lightning keeps."""
    return [value.detach() for value in callback._average_model.state_dict().values()]


WINDOWS: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), sampling.grid(AVERAGES, WINDOWS, count=3))
def test_averages_of_lightning_equal_stock(name: str, settings: dict[str, Any]) -> None:
    expected = AVERAGES[name]()
    stock = fit("auto", seeded_module(**OPTIONS), callbacks=[expected], max_epochs=3, **settings)
    for memory in budgets(stock.module):
        found = AVERAGES[name]()
        ours = fit(
            OffmateStrategy(memory=memory), seeded_module(**OPTIONS), callbacks=[found], max_epochs=3, **settings
        )
        assert differences(stock, ours) == []
        assert all(map(equal, averaged(expected), averaged(found)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.some(["ema", "swa"], 1))
def test_averages_in_checkpoints(name: str, tmp_path: Path) -> None:
    """What is saved is the average; the run goes on with the weights that were averaged."""
    expected = fit("auto", seeded_module(**OPTIONS), callbacks=[AVERAGES[name]()], max_epochs=3)
    for memory in budgets(expected.module):
        saver = ModelCheckpoint(tmp_path / f"{memory}", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        saving: dict[str, Any] = {"callbacks": [AVERAGES[name](), saver], "enable_checkpointing": True, "max_epochs": 3}
        fit(OffmateStrategy(memory=memory), seeded_module(**OPTIONS), **saving)
        path = tmp_path / f"{memory}" / "epoch=1.ckpt"
        callbacks = [AVERAGES[name]()]
        ours = fit(
            OffmateStrategy(memory=memory), seeded_module(**OPTIONS), callbacks=callbacks, ckpt=path, max_epochs=3
        )
        weights, found = expected.module.state_dict(), ours.module.state_dict()
        assert [key for key in weights if not equal(weights[key], found[key])] == []


# -- batch norm --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.linear(x)))


class Normed(LightningModule):
    """Blocks with statistics of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(32, 3)
        self.losses: list[Tensor] = []
        self.validation: list[Tensor] = []
        self.lrs: list[list[float]] = []

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validation.append(self._loss(batch).detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader([(torch.randn(32, generator=generator), i % 3) for i in range(24)], batch_size=8)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_averages_of_models_with_batch_norm_equal_stock(name: str) -> None:
    """Stochastic weight averaging runs one more epoch then, without backwards and updates."""
    stock = fit("auto", Normed(), callbacks=[AVERAGES[name]()], max_epochs=3)
    assert len(stock.module.losses) == (12 if name == "swa" else 9)
    for memory in (2 * memory for memory in budgets(stock.module)):
        ours = fit(OffmateStrategy(memory=memory), Normed(), callbacks=[AVERAGES[name]()], max_epochs=3)
        assert differences(stock, ours) == []


@pytest.mark.parametrize("settings", [{"limit_val_batches": 0}, {"check_val_every_n_epoch": 2}], ids=str)
def test_the_update_that_lightning_does_by_mistake_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="StochasticWeightAveraging of a model with batch norm: .* validate"):
        fit(OffmateStrategy(memory="200MB"), Normed(), callbacks=[AVERAGES["swa"]()], max_epochs=3, **settings)


@pytest.mark.parametrize("cls", [EMAWeightAveraging, StochasticWeightAveraging])
def test_an_average_on_the_gpu_is_refused(cls: type[Any]) -> None:
    options = {"swa_lrs": 0.1} if cls is StochasticWeightAveraging else {}
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__}\(device='cuda'\): .* device='cpu'"):
        fit(OffmateStrategy(memory="200MB"), callbacks=[cls(device="cuda", **options)])


def test_callbacks_of_a_trainer_that_only_validates_pass() -> None:
    made = trainer(OffmateStrategy(memory="200MB"), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])
    made.validate(Normed(), verbose=False)
