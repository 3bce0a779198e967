"""A Trainer in two processes: with the strategy, with stock ``ddp``, and where one process goes wrong.

``python -m tests.parity.several.trainers FOLDER`` imports everything once, forks two processes, and leaves in the
folder what each of them saw.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import lt_offload
from lt_offload.schema.profile import Profile
from tests.parity.several import training
from tests.support import trainers

MEMORY = "40MB"


class Synced(trainers.Module):
    """Logs the mean of all processes."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch).loss
        self.log("val_loss", loss, sync_dist=True)
        self.validation.append(loss.detach().clone())

    def on_validation_end(self) -> None:
        self.validation.append(self.trainer.callback_metrics["val_loss"].clone())


class Broken(Synced):
    """Fails in the second process, at its third step: the first one is run twice."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("broken here")


class Uneven(Synced):
    """Has more batches in the second process than in the first."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = trainers.Tokens(self.model, 4 + 2 * self.trainer.global_rank, 0)
        return DataLoader(rows, batch_size=1, sampler=DistributedSampler(rows, 1, 0, shuffle=False))


class Streamed(Uneven):
    """The same, and nobody knows how many there are."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Stream(super().train_dataloader().dataset), batch_size=1)


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows without a number."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


class Edited(Synced):
    """Edits gradients where callbacks may: after a backward, and before a step."""

    def on_after_backward(self) -> None:
        for param in self.model.parameters():
            param.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for param in self.model.parameters():
            param.grad.clamp_(-1e-4, 1e-4)


class Infinite(Synced):
    """Has an infinite loss in the first step of the second process, and once in the first process."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        bad = (self.trainer.global_rank, self.trainer.global_step) in ((1, 0), (0, 3))
        return loss * float("inf") if bad else loss


class Unfrozen(Synced):
    """Trains its first layer from the third step on."""

    def on_train_start(self) -> None:
        self.model.model.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.model.model.layers[0].requires_grad_(True)


class Skipped(Synced):
    """Has no loss for the last micro-batch of a window."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def module(kind: type[Any] = Synced) -> Any:
    import lightning.pytorch

    lightning.pytorch.seed_everything(7, verbose=False)
    return kind(shuffle=True, batch_size=1)


def main(folder: Path) -> None:
    port = training.free_port()
    training.models.build()  # transformers is imported once

    def work(rank: int) -> None:
        os.environ.update(training.environment(rank, 2, port))
        found: dict[str, Any] = {}
        run = trainers.fit(lt_offload.OffmateStrategy(memory=MEMORY), module(), devices=2)
        run.trainer.save_checkpoint(folder / "run.ckpt")
        found["differences"] = trainers.differences(run, trainers.fit("ddp", module(), devices=2))
        found["weights"] = run.module.state_dict()
        found["steps"] = run.trainer.global_step
        found["chosen"] = chosen()
        found["edited"] = edited()
        found["scaled"] = scaled()
        found["averaged"] = averaged(folder)
        found["closed"] = failing_early(rank)
        found["small"] = failing(module(), memory=MEMORY, host_memory="3MB")
        found["tiny"] = failing(module(), memory=1000)
        found["uneven"] = failing(module(Uneven), memory=MEMORY)
        found["streamed"] = failing(module(Streamed), memory=MEMORY)
        found["skipped"] = failing(module(Skipped), memory=MEMORY, accumulate=2)
        found["settings"] = failing(module(), memory=f"{40 + rank}MB")
        found["broken"] = failing(module(Broken), memory=MEMORY)
        torch.save(found, folder / f"{rank}.pt")

    training.fork(2, work)


def chosen() -> tuple[int, list[str]]:
    """Return the size that ``batch_size="auto"`` takes, and what differs from stock ``ddp`` with that size.

    A batch of any size takes as long as another, so that the largest is the fastest per sample on a busy machine, too.
    """

    def alike(measure: Callable[[], Profile], _: Any) -> Profile:
        found = measure()
        blocks = []
        for block in found.blocks:
            options = (replace(option, forward_s=1e-3, backward_s=2e-3) for option in block.options)
            blocks.append(replace(block, options=tuple(options)))
        return replace(found, blocks=tuple(blocks))

    strategy = lt_offload.OffmateStrategy(memory=MEMORY, batch_size="auto")
    with pytest.MonkeyPatch.context() as patch:
        trainers.profiled(patch, alike)
        run = trainers.fit(strategy, module(), devices=2, max_epochs=1)
    assert strategy.plan is not None
    size = run.module.batch_size
    other = module()
    other.batch_size = size
    found = trainers.differences(run, trainers.fit("ddp", other, devices=2, max_epochs=1))
    return size, [*found, *(["the plan"] if strategy.plan.batch_size != size else [])]


def edited() -> list[str]:
    """Return what differs from stock ``ddp`` where gradients are edited, with updates on the host."""
    strategy = lt_offload.OffmateStrategy(memory=MEMORY, planner="l2l")
    run = trainers.fit(strategy, module(Edited), devices=2, max_epochs=1)
    assert strategy.plan is not None
    assert "host" in strategy.plan.update_places
    return trainers.differences(run, trainers.fit("ddp", module(Edited), devices=2, max_epochs=1))


def scaled() -> list[str]:
    """Return what differs from stock ``ddp`` where a scaler leaves steps out, with updates on the host, clipped.

    It computes in bfloat16: in float16 ``ddp``, which divides by the number of processes later, has other last bits.
    """
    runs, scales = [], []
    strategy = lt_offload.OffmateStrategy(memory=MEMORY, planner="l2l")
    for one in (strategy, "ddp"):
        scaler = torch.amp.GradScaler("cpu", 2.0**16, 2.0**20, 2.0**-20, growth_interval=2)
        precision = MixedPrecision("16-mixed", "cpu", scaler)  # type: ignore[arg-type]
        precision.autocast_context_manager = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)  # type: ignore[method-assign]
        options: dict[str, Any] = {"devices": 2, "gradient_clip_val": 0.1, "plugins": [precision]}
        with warnings.catch_warnings(action="ignore"):  # the schedule begins before the optimizer
            runs.append(trainers.fit(one, unfused(module(Infinite)), **options))
        scales.append(scaler.state_dict())
    assert strategy.plan is not None
    assert "host" in strategy.plan.update_places
    return trainers.differences(*runs) + ["scales"] * (scales[0] != scales[1])


def unfused(module: Any) -> Any:
    """Return ``module`` with an optimizer whose gradients may be clipped though they are scaled."""
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)
    return module


def averaged(folder: Path) -> list[str]:
    """Return what differs from stock ``ddp`` where an average of the weights is kept, and weights alone are saved."""
    averages = []
    for strategy in (lt_offload.OffmateStrategy(memory=MEMORY, planner="l2l"), "ddp"):
        name = strategy if isinstance(strategy, str) else "ours"
        average = EMAWeightAveraging(decay=0.5)
        saver = ModelCheckpoint(folder / name, every_n_train_steps=1, save_weights_only=True, save_top_k=-1)
        options: dict[str, Any] = {"devices": 2, "max_epochs": 1, "enable_checkpointing": True}
        trainers.fit(strategy, module(), callbacks=[average, saver], **options)
        averages.append({key: value.clone() for key, value in average._average_model.module.state_dict().items()})
    found = [] if training.alike(*averages) else ["averages"]
    for path in (folder / "ours").iterdir():
        ours, stock = (torch.load(one / path.name, weights_only=True) for one in (folder / "ours", folder / "ddp"))
        assert "optimizer_states" not in ours
        found += [] if training.alike(ours["state_dict"], stock["state_dict"]) else [path.name]
    assert len(list((folder / "ours").iterdir())) == trainers.BATCHES
    return found


def failing_early(rank: int) -> str:
    """Return what is said where the second process may not open files of the first one; nothing is measured."""
    opened = os.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> int:
        if rank == 1 and str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *args, **kwargs)

    strategy = lt_offload.OffmateStrategy(memory=MEMORY)
    with mock.patch("os.open", refused):
        try:
            trainers.fit(strategy, module(), devices=2)
        except lt_offload.OffloadError as error:
            return f"{type(error).__name__}: {error}" if strategy.profile is None else "too late"
    return "nothing"


def failing(seen: Any, *, accumulate: int = 1, **options: Any) -> str:
    """Return what a run fails with."""
    try:
        trainers.fit(lt_offload.OffmateStrategy(**options), seen, devices=2, accumulate_grad_batches=accumulate)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
