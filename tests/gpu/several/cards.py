"""Training on several cards, or on one that accumulates as many batches: ``python -m ... FOLDER CARDS``.

Lightning's launcher starts one process for each card. The first one leaves weights, states and losses of each way.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import lt_offload
from tests.gpu.users.runs import MODEL
from tests.support import trainers

WAYS: dict[str, dict[str, Any]] = {
    "host": {"planner": "l2l"},
    "beside": {"planner": "l2l"},
    "device": {"planner": "l2l", "host_update": False},
    "resident": {"planner": "resident"},
}
"""Where updates are; everything travels in the first three. None of these planners asks how long anything takes."""


class Dealt(trainers.Module):
    """Deals its rows to all processes in turn; Lightning's sampler would shuffle them before."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = trainers.Tokens(self.model, 2 * trainers.BATCHES, 0)
        own = range(self.trainer.global_rank, len(rows), self.trainer.world_size)
        return DataLoader(Subset(rows, own), batch_size=1)


def main(folder: Path, cards: int) -> None:
    """Train in every way, two batches per update in all."""
    torch.use_deterministic_algorithms(True)
    for way, options in WAYS.items():
        lightning.pytorch.seed_everything(7, verbose=False)
        strategy = lt_offload.OffmateStrategy(memory="2GB", **options)
        # Updates that do not wait for the other card, however long they are said to take.
        strategy.settings = replace(strategy.settings, hosted=way == "beside")
        run = trainers.fit(
            strategy,
            Dealt(batch_size=1, **MODEL),
            accelerator="gpu",
            devices=cards,
            accumulate_grad_batches=2 // cards,
            max_epochs=1,
            use_distributed_sampler=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
        state = run.optimizer.state_dict()["state"]
        plan = run.trainer.strategy.plan
        found = {
            "steps": run.trainer.global_step,
            "weights": run.module.state_dict(),
            "states": {index: dict(values) for index, values in state.items()},
            "losses": run.module.losses,
            "places": sorted(set(plan.update_places)),
            "prefetches": sum(op.kind == "prefetch" for op in plan.ops),
            "delayed": plan.delayed,
        }
        if run.trainer.is_global_zero:
            torch.save(found, folder / f"{way}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
