"""Two processes of a Trainer that part: one stops, saves or changes something, and the other one does not.

``python -m tests.parity.several.apart.parting FOLDER`` imports everything once, forks two processes, and leaves in
the folder what each of them says of each case.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lt_offload
from lt_offload.distributed import sums
from tests.parity.several import training
from tests.parity.several.trainers import MEMORY, Synced, failing, module
from tests.support import trainers

WEIGHT = "model.model.layers.0.mlp.up_proj.weight"


class Parting(Synced):
    """Does something after its first step; rows are enough for three."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.trainer.global_step == 1:
            self.part(self.trainer.global_rank)

    def part(self, rank: int) -> None:
        """Do what another process does not."""


class Rate(Parting):
    """Changes its learning rate."""

    def part(self, rank: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.5 + 0.5 * rank


class Stopped(Parting):
    """Ends its training."""

    def part(self, rank: int) -> None:
        self.trainer.should_stop = rank == 1


class Saved(Parting):
    """Writes a checkpoint, as many do in the first process alone."""

    def part(self, rank: int) -> None:
        if rank == 0:
            self.trainer.save_checkpoint("never.ckpt")


class Waiting(Parting):
    """Waits for others that do not."""

    def part(self, rank: int) -> None:
        if rank == 0:
            self.trainer.strategy.barrier("mine")


class Written(Parting):
    """Writes a weight, unseen by autograd, and with another value."""

    def part(self, rank: int) -> None:
        self.get_parameter(WEIGHT).data.fill_(0.9 + 0.01 * rank)


class Shuffled(Parting):
    """Writes the same values in another order."""

    def part(self, rank: int) -> None:
        with torch.no_grad():
            weight = self.get_parameter(WEIGHT)
            weight.copy_(weight.roll(1 + rank, 0))


class State(Parting):
    """Writes an optimizer state with another value."""

    def part(self, rank: int) -> None:
        self.trainer.optimizers[0].state[self.get_parameter(WEIGHT)]["exp_avg"].fill_(0.01 * rank)


class Outside(Parting):
    """Writes a parameter outside the blocks with another value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * self.scale.mean()

    def part(self, rank: int) -> None:
        self.scale.data.fill_(1 + 0.01 * rank)


class Alike(Outside):
    """Does all of that in both processes."""

    def part(self, rank: int) -> None:
        for kind in (Rate, Written, Shuffled, State, Outside):
            kind.part(self, 1)


class Edited(Parting):
    """Edits its gradients, which are those of all, by another factor."""

    def on_after_backward(self) -> None:
        for param in self.model.parameters():
            param.grad.mul_(0.5 + 0.1 * self.trainer.global_rank)


class Once(Parting):
    """Assigns a gradient in one process."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        weight = self.get_parameter(WEIGHT)
        if self.trainer.global_rank == 1:
            weight.grad = 2 * weight.grad


class Short(Parting):
    """Finds no room for the exchange of gradients."""

    def part(self, rank: int) -> None:
        if rank == 1:
            mock.patch.object(sums, "flat", side_effect=lt_offload.OverBudget("86.8 kB are needed")).start()


class Halved(Synced):
    """Has its gradients looked at, so that updates wait for those of all processes."""

    def on_after_backward(self) -> None:
        for param in self.model.parameters():
            param.grad.mul_(0.5)


CASES: dict[str, type[Any]] = {
    "rate": Rate,
    "stopped": Stopped,
    "saved": Saved,
    "waiting": Waiting,
    "written": Written,
    "shuffled": Shuffled,
    "state": State,
    "outside": Outside,
    "edited": Edited,
    "once": Once,
    "short": Short,
}
PLANNERS = dict.fromkeys(CASES, ("l2l",)) | {"written": ("l2l", "resident"), "outside": ("l2l", "resident")}
PLANNERS |= dict.fromkeys(("edited", "once"), ("l2l", "resident"))
"""All updates are on the host, or on the device; in the latter case gradients are added up by a collective."""
PLANNERS["short"] = ("resident",)

WAYS: dict[str, dict[str, Any]] = {
    "all travels": {"planner": "l2l"},
    "all stays": {"planner": "resident"},
    "recomputed": {"memory": "1MB", "activation_offload": False},
}


def main(folder: Path) -> None:
    port = training.free_port()
    training.models.build()  # transformers is imported once

    def work(rank: int) -> None:
        os.environ.update(training.environment(rank, 2, port))
        found: dict[str, Any] = {}
        for name, kind in CASES.items():
            for planner in PLANNERS[name]:
                late = threading.Timer(training.PATIENCE, os._exit, [1])
                late.start()
                said = failing(module(kind), memory=MEMORY, planner=planner)
                late.cancel()
                mock.patch.stopall()
                found[f"{name}, {planner}"] = said
        for name, options in WAYS.items():
            found[name] = differences(Alike, **options)
        for switches in ({}, {"host_update": False}):
            found[f"small {switches}"] = differences(Halved, memory=smallest_memory(**switches), **switches)
        torch.save(found, folder / f"{rank}.pt")

    training.fork(2, work)


def differences(kind: type[Any], *, memory: Any = MEMORY, **options: Any) -> list[str]:
    """Return what differs from stock ``ddp``."""
    run = trainers.fit(lt_offload.OffmateStrategy(memory=memory, **options), module(kind), devices=2, max_epochs=1)
    return trainers.differences(run, trainers.fit("ddp", module(kind), devices=2, max_epochs=1))


def smallest_memory(**options: Any) -> str:
    """Return the smallest memory that the error for less of it names."""
    said = failing(module(Halved), memory="50kB", **options)
    return said.partition("batch_size=1")[2].partition(": memory=")[2].partition(" ")[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
