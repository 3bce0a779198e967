"""A callback that notes when the first step of a run begins and ends."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

MARKS: dict[str, float] = {}
"""Readings of ``time.perf_counter``, by what happened then for the first time."""


class Marks(Callback):
    """Fills :data:`MARKS`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Settings are known, files are checked."""
        MARKS.setdefault("setup_s", time.perf_counter())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is there, planned for and installed."""
        MARKS.setdefault("loaded_s", time.perf_counter())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first step begins."""
        MARKS.setdefault("first_step_s", time.perf_counter())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """It has ended."""
        MARKS.setdefault("after_first_step_s", time.perf_counter())
