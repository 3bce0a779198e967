"""Whole runs of a Trainer: by several processes, by stock ``ddp``, and by one process that accumulates as many batches.

``python -m tests.parity.several.runs FOLDER`` imports everything once, forks processes, and leaves in the folder what
each run has come to: ``NAME.pt``, and as ``NAME, plain.pt`` what one process without the strategy makes of it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lt_offload
from lt_offload.strategy.checkpoint import archive
from tests.parity.several import training
from tests.parity.several.trainers import MEMORY, Synced, Unfrozen
from tests.support import trainers

ROWS = 8
"""Of an epoch: as many batches for each of 1, 2 and 4 processes."""
ALONE, PAIR, FOUR, APART, GRID = (1, 1), (2, 1), (4, 1), (2, 2), (4, 2)
"""How many processes there are, on how many machines."""
RESUMED = {
    "2 from 1": (PAIR, "1"),
    "2 from 2": (PAIR, "2"),
    "1 from 2": (ALONE, "2"),
    "4 from 2": (FOUR, "2"),
    "2 on 2 from 2 on 2": (APART, "2 on 2"),
    "4 on 2 from 2 on 2": (GRID, "2 on 2"),
    "1 from 2 on 2": (ALONE, "2 on 2"),
}
"""How many processes go on from whose checkpoint; "on 2" are those on two machines."""
MIDWAY = {"4 from a step of 2": (FOUR, "2, steps/step=2"), "1 from a step of 2": (ALONE, "2, steps/step=2")}
"""The same in the middle of an epoch, to its end."""
PLAIN, STOCK = ", plain", ", ddp"
LATER = "2, saved while training goes on"
SCALED = "2, 16-mixed"


class Whole(Synced):
    """Takes rows in their order, the processes in turn, and keeps what it was given before it trained."""

    def __init__(self) -> None:
        super().__init__(shuffle=False, batch_size=1)
        self.outside = nn.Parameter(torch.ones(3))
        """Of no block."""
        self.loaded: Any = None
        self.saved: Path | None = None
        """Where it saves, while all that training has is still there."""
        self.rows: list[list[int]] = []
        """What it trained on, after planning."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + (self.outside**2).sum() * batch["input_ids"].float().mean() / 100

    def on_train_start(self) -> None:
        super().on_train_start()
        states = self.trainer.optimizers[0].state_dict()["state"]
        self.loaded = copy.deepcopy((self.state_dict(), states))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rows += batch["input_ids"].tolist()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.trainer.save_checkpoint(self.saved)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = trainers.Tokens(self.model, ROWS, 0)
        # Lightning's own shuffles.
        sampler = DistributedSampler(rows, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=1, sampler=sampler)


class WholeUnfrozen(Whole, Unfrozen):
    """Trains its first layer from the third step on."""


def ours(*, later: bool = False) -> lt_offload.OffmateStrategy:
    """The strategy, with updates on the host: of several processes each owns some of the weights."""
    return lt_offload.OffmateStrategy(memory=MEMORY, planner="l2l", async_checkpoint=later)


def scaled() -> dict[str, Any]:
    """Return what makes a Trainer scale losses by so much that every second step is left out."""
    scaler = torch.amp.GradScaler("cpu", 2.0**30, 2.0**14, 2.0**-14, growth_interval=1)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}  # type: ignore[arg-type]


def every_step(folder: Path) -> dict[str, Any]:
    """Return what makes a Trainer save after every step."""
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last="link")
    return {"enable_checkpointing": True, "callbacks": [saver]}


@contextmanager
def counted(file: Path) -> Iterator[None]:
    """Leave in ``file`` the bytes that this process writes into checkpoints of all."""
    fill, before = archive.fill, Counter[str]()

    def counting(descriptor: int, records: Any, read: Any) -> dict[int, int]:
        found = list(records)
        before["bytes"] += sum(record.nbytes for record in found)
        return fill(descriptor, found, read)

    archive.fill = counting
    try:
        yield
    finally:
        archive.fill = fill
        file.write_text(str(before["bytes"]))


def train(folder: Path, name: str, strategy: Any, *, kind: type[Any] = Whole, start: str = "", **options: Any) -> None:
    """Train to the end of the next epoch, with or without a checkpoint to ``start`` from; keep what it comes to."""
    lightning.pytorch.seed_everything(7, verbose=False)
    ckpt = folder / f"{start}.ckpt" if start else None
    epochs = 2 if start and "steps" not in start else 1
    module = kind()
    module.saved = folder / f"{name}.ckpt"
    with counted(folder / f"{name}-{os.environ.get('RANK', 0)}.written"):
        run = trainers.fit(strategy, module, max_epochs=epochs, ckpt=ckpt, **options)
    if isinstance(strategy, lt_offload.OffmateStrategy):
        assert strategy.plan is not None
        assert "host" in strategy.plan.update_places
    (folder / f"{name}-{os.environ.get('RANK', 0)}.rows").write_text(json.dumps(run.module.rows))
    if run.trainer.is_global_zero:
        found = {"weights": run.module.state_dict(), "states": run.optimizer.state_dict()["state"]}
        found |= {"validation": run.module.validation, "loaded": run.module.loaded, "steps": run.trainer.global_step}
        torch.save(found, folder / f"{name}.pt")


def by(count: int, machines: int, folder: Path) -> None:
    """Carry out the runs of so many processes."""
    devices: dict[str, Any] = {"devices": count // machines, "num_nodes": machines}
    if (count, machines) == PAIR:
        for name, later in (("2", False), (LATER, True)):
            train(folder, name, ours(later=later), **devices, **every_step(folder / f"{name}, steps"))
        train(folder, SCALED, ours(), **devices, **scaled())
        train(folder, "2" + STOCK, "ddp", **devices)
        train(folder, "unfrozen", ours(), kind=WholeUnfrozen, **devices)
        stock = "ddp_find_unused_parameters_true"
        train(folder, "unfrozen" + STOCK, stock, kind=WholeUnfrozen, **devices)
        train(folder, "2 from 2" + STOCK, "ddp", start="2", **devices)
    if (count, machines) == APART:
        train(folder, "2 on 2", ours(), **devices)
        train(folder, "2 on 2" + STOCK, "ddp", **devices)
    for name, (group, start) in (RESUMED | MIDWAY).items():
        if group == (count, machines):
            train(folder, name, ours(), start=start, **devices)


def plainly(folder: Path) -> None:
    """Carry out the runs without the strategy, in one process."""
    one: dict[str, Any] = {"devices": 1}
    train(folder, "2" + PLAIN, "auto", accumulate_grad_batches=2, **one)
    train(folder, SCALED + PLAIN, "auto", accumulate_grad_batches=2, **one, **scaled())
    train(folder, "unfrozen" + PLAIN, "auto", kind=WholeUnfrozen, accumulate_grad_batches=2, **one)
    train(folder, "2 on 2" + PLAIN, "auto", accumulate_grad_batches=2, **one)
    for name, ((ranks, _), start) in RESUMED.items():
        train(folder, name + PLAIN, "auto", start=start, accumulate_grad_batches=ranks, **one)


def main(folder: Path) -> None:
    """Carry out all runs; those that go on come after those that leave their checkpoints."""
    training.models.build()  # transformers is imported once

    def work(rank: int, count: int, machines: int, port: int) -> None:
        os.environ.update(training.environment(rank, count, port, machines))
        by(count, machines, folder)

    training.fork(1, lambda _: train(folder, "1", ours(), devices=1))
    for group in (PAIR, FOUR, APART, GRID):
        port = training.free_port()
        training.fork(group[0], lambda rank, group=group, port=port: work(rank, *group, port))
    training.fork(1, lambda _: (by(*ALONE, folder), plainly(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
