"""A script as users write it: ``python -m tests.parity.several.script FOLDER``, or the same under torchrun.

With ``DIES`` in the environment the second process is killed at its fourth step, once. ``NODES`` is the number of
machines, on which the two processes are.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lt_offload
from tests.support import trainers

STEPS = 6
NODES = int(os.environ.get("NODES", "1"))


class Module(trainers.Module):
    """Dies once, if it is to."""

    folder: Path

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        died = self.folder / "died"
        if "DIES" in os.environ and self.trainer.global_rank == 1 and self.global_step == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def main(folder: Path) -> None:
    """Train, from the last checkpoint if there is one."""
    import lightning.pytorch

    lightning.pytorch.seed_everything(7, verbose=False)
    module = Module(batch_size=1)
    module.folder = folder
    last = folder / "kept" / "last.ckpt"
    saver: Any = ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_last=True)
    run = trainers.fit(
        lt_offload.OffmateStrategy(memory="40MB", planner="l2l"),
        module,
        ckpt=last if last.exists() else None,
        devices=2 // NODES,
        num_nodes=NODES,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    if run.trainer.is_global_zero:
        torch.save((run.trainer.global_step, module.state_dict()), folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
