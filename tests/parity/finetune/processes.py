"""Runs of a recipe's module that say which batches and losses they had: in this process, or in several by Lightning.

``python -m tests.parity.finetune.processes FOLDER`` makes all of them in two processes, each of which leaves what it
saw in ``FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor

import lt_offload
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from tests.support.trainers import trainer

STEPS = 4
PADDED: dict[str, Any] = {"pack": False, "group_by_length": True}
STREAMED: dict[str, Any] = {"streaming": True, "stream_buffer": 6, "num_workers": 1}
CASES: dict[str, dict[str, Any]] = {
    "padded": {"data": PADDED, "max_steps": 8},
    "padded, stopped": {"data": PADDED, "max_steps": 2, "save": "padded.ckpt"},
    "padded, resumed": {"data": PADDED, "max_steps": 8, "ckpt": "padded.ckpt"},
    "padded, of one": {"data": PADDED, "max_steps": 8, "ckpt": "padded-of-one.ckpt"},
    "batches": {
        "data": {"num_workers": 1, "max_length": 60},
        "loss_average": "batches",
        "use_distributed_sampler": False,
    },
    "accumulated": {"data": {"pack": "wrapped", "max_length": 44}, "accumulate_grad_batches": 2},
    "streamed": {"data": STREAMED, "use_distributed_sampler": False},
    "streamed, stopped": {"data": STREAMED, "max_steps": 1, "save": "streamed.ckpt"},
    "streamed, resumed": {"data": STREAMED, "ckpt": "streamed.ckpt"},
}


class Watched(FineTune):
    """Keeps what it saw."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.batches: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.held_out: list[tuple[Tensor, int]] = []
        self.val_losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches.append({name: value.clone() for name, value in batch.items() if value.ndim})
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.losses.append(self.trainer.callback_metrics["train_loss"].clone())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.held_out.append((self._means(batch)[0].detach(), int((batch["labels"][:, 1:] != IGNORED).sum())))

    def on_validation_end(self) -> None:
        self.val_losses.append(self.trainer.callback_metrics["val_loss"].clone())


def module(folder: Path, **settings: Any) -> Watched:
    lightning.pytorch.seed_everything(7, verbose=False)
    return Watched(str(folder / "model"), lr=1e-2, schedule="constant", **settings)


def fit(
    folder: Path,
    strategy: str,
    *,
    data: dict[str, Any],
    loss_average: Any = None,
    save: str | None = None,
    ckpt: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train, and return what this process saw."""
    defaults: dict[str, Any] = {"max_length": 64, "batch_size": 2, "validation_rows": 5}
    if "streaming" not in data:
        defaults["cache_dir"] = str(folder / f"cache of {strategy}")
    source = FineTuneData(str(folder / "model"), path=str(folder / "rows.jsonl"), **defaults | data)
    seen = module(folder, loss_average=loss_average)
    run = trainer(
        strategy,
        callbacks=[lt_offload.ExactResume(on_interrupt=False)],
        **{"max_steps": STEPS, "max_epochs": -1, "num_sanity_val_steps": 0} | settings,
    )
    path = None if ckpt is None else folder / f"{run.world_size}-{ckpt}"
    run.fit(seen, datamodule=source, ckpt_path=path, weights_only=True)
    if save is not None:
        run.save_checkpoint(folder / f"{run.world_size}-{save}")
    assert seen.model is not None
    return {
        "batches": seen.batches,
        "losses": seen.losses,
        "held_out": seen.held_out,
        "val_losses": seen.val_losses,
        "weights": seen.model.state_dict(),
        "steps": run.global_step,
    }


def result(folder: Path, case: str, rank: int) -> Path:
    return folder / f"{case}-{rank}.pt"


def main(folder: Path) -> None:
    for case, settings in CASES.items():
        found = fit(folder, "ddp", devices=2, **settings)
        torch.save(found, result(folder, case, torch.distributed.get_rank()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
