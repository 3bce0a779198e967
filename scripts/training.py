"""What runs inside the measured processes: a callback that records a training run. Imports torch and Lightning."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lt_offload.finetune.run.record import RunRecord, engine_of
from scripts.planning import busy, describe


class Recorder(RunRecord):
    """Records losses, step times and peaks, and at the end weights and optimizer state, in a folder.

    A step's time runs from the end of the step before, as offloaded updates go on after ``optimizer.step()``.

    Args:
        folder: gets ``figures.json`` and ``end.ckpt``.
        warm_up: steps that are not timed, at least 2: the first step allocates, the second may be counted.
        checkpoint: whether to write ``end.ckpt``.
    """

    def __init__(self, folder: str, warm_up: int = 2, checkpoint: bool = True) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.warm_up = max(warm_up, 2)
        self.checkpoint = checkpoint
        self.seconds: list[float] = []
        self.predicted: list[float] = []
        """Per timed step, what the plan of that step says."""
        self._last = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note loss, time and peak."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        engine = engine_of(trainer)
        if len(self.losses) >= self.warm_up:
            self.seconds.append(now - self._last)
            if engine is not None:
                self.predicted.append(engine.plan.predicted.iteration_s)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._last = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write everything."""
        figures: dict[str, Any] = {
            "losses": self.losses,
            "steps_s": self.seconds,
            "device_peak_bytes": self.device_peak,
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        engine = engine_of(trainer)
        if engine is not None:
            figures["predicted_s"] = self.predicted
            figures["host_peak_bytes"] = engine.stats.host_peak_bytes
            figures["plan"] = describe(engine.plan, trainer.strategy.profile)
            figures["busy_s"] = busy(engine.trace())
        if self.checkpoint:
            trainer.save_checkpoint(self.folder / "end.ckpt")
        (self.folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
