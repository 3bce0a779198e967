"""Loaders side by side, of which one keeps its position itself: all go on where they were in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.trainers import Forced


class Positioned(DataLoader[Tensor]):
    """Saves how many batches it has given."""

    given = 0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given = number + 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Unsized(Positioned):
    def __len__(self) -> int:
        raise TypeError("a stream")


class Pairs(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append((batch_idx, [float(part[0, 0]) for part in batch.values()]))
        loss: Tensor = self.net(torch.cat([*batch.values()])).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def trained(kinds: dict[str, tuple[type[DataLoader[Tensor]], int]], mode: Any, folder: Path, ckpt: Any = None) -> Pairs:
    L.seed_everything(1, verbose=False)
    module = Pairs()
    loaders = {
        name: kind(torch.arange(float(rows)).repeat(4, 1).T, batch_size=2, shuffle=kind is DataLoader)  # type: ignore[arg-type]
        for name, (kind, rows) in kinds.items()
    }
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = L.Trainer(
        strategy=Forced(), accelerator="cpu", max_steps=9, callbacks=[saver], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, CombinedLoader(loaders, mode), ckpt_path=ckpt)
    return module


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
@pytest.mark.parametrize("second", [8, 12])
@pytest.mark.parametrize("kinds", [(Positioned, DataLoader), (DataLoader, Positioned)], ids=["first", "second"])
def test_each_goes_on_where_it_was(kinds: Any, second: int, mode: str, tmp_path: Path) -> None:
    made = {"one": (kinds[0], 12), "other": (kinds[1], second if kinds[1] is DataLoader else 12)}
    whole = trained(made, mode, tmp_path)
    rest = trained(made, mode, tmp_path, tmp_path / "step=3.ckpt")
    assert rest.seen == whole.seen[3:]
    assert all(map(torch.equal, rest.state_dict().values(), whole.state_dict().values()))


@pytest.mark.filterwarnings("ignore:.*does not have a __len__")
def test_a_batch_that_was_fetched_ahead_is_said(tmp_path: Path) -> None:
    made: Any = {"one": (Unsized, 12), "other": (DataLoader, 12)}
    trained(made, "max_size_cycle", tmp_path)
    with pytest.warns(UserWarning, match="has no length, so that a batch of every loader was fetched ahead"):
        trained(made, "max_size_cycle", tmp_path, tmp_path / "step=3.ckpt")
