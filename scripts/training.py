"""What runs inside the measured processes: a callback that records a training run. Imports torch and Lightning."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lt_offload.machine.accounting import Account
from lt_offload.machine.heap import keep_freed_memory
from scripts.planning import busy, describe

COUNTED_STEP = 1
"""The first step that begins with optimizer states; without a GPU, plain training's tensors are counted during it."""


class Recorder(Callback):
    """Records losses, step times and peaks, and at the end weights and optimizer state, in a folder.

    A step's time runs from the end of the step before, as offloaded updates go on after ``optimizer.step()``. Without a
    GPU plain training has the heap of the emulated device, too: otherwise that would be part of what is compared.

    Args:
        folder: gets ``figures.json`` and ``end.ckpt``.
        warm_up: steps that are not timed, at least 2: the first step allocates, the second may be counted.
        checkpoint: whether to write ``end.ckpt``.
    """

    def __init__(self, folder: str, warm_up: int = 2, checkpoint: bool = True) -> None:
        self.folder = Path(folder)
        self.warm_up = max(warm_up, 2)
        self.checkpoint = checkpoint
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.predicted: list[float] = []
        """Per timed step, what the plan of that step says."""
        self.device_peak = 0
        self._account: Account | None = None
        self._last = 0.0
        if not torch.cuda.is_available():
            keep_freed_memory()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start counting, in the step and on the machine where that is needed."""
        if len(self.losses) != COUNTED_STEP or torch.cuda.is_available() or _engine(trainer) is not None:
            return
        states = [s for o in trainer.optimizers for entry in o.state.values() for s in entry.values()]
        self._account = Account()
        self._account.charge(*pl_module.parameters(), *pl_module.buffers())
        self._account.charge(*(s for s in states if isinstance(s, torch.Tensor)))
        self._account.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note loss, time and peak."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        engine = _engine(trainer)
        if len(self.losses) >= self.warm_up:
            self.seconds.append(now - self._last)
            if engine is not None:
                self.predicted.append(engine.plan.predicted.iteration_s)
        self.losses.append(float(outputs["loss"]))
        if self._account is not None:
            self._account.__exit__(None, None, None)
            self.device_peak, self._account = self._account.peak, None
        elif engine is not None:
            self.device_peak = max(self.device_peak, engine.stats.device_peak_bytes)
        elif torch.cuda.is_available():
            self.device_peak = torch.cuda.max_memory_reserved()
        self._last = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write everything."""
        figures: dict[str, Any] = {
            "losses": self.losses,
            "steps_s": self.seconds,
            "device_peak_bytes": self.device_peak,
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        engine = _engine(trainer)
        if engine is not None:
            figures["predicted_s"] = self.predicted
            figures["host_peak_bytes"] = engine.stats.host_peak_bytes
            figures["plan"] = describe(engine.plan, trainer.strategy.profile)
            figures["busy_s"] = busy(engine.trace())
        if self.checkpoint:
            trainer.save_checkpoint(self.folder / "end.ckpt")
        (self.folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


def _engine(trainer: Trainer) -> Any:
    return getattr(trainer.strategy, "engine", None)
