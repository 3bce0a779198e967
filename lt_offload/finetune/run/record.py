"""A callback that keeps what two runs are compared by: losses and peaks, weights and optimizer states."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lt_offload.compat.torch import tree_map
from lt_offload.machine.accounting import Account
from lt_offload.machine.driver import beside_bytes
from lt_offload.machine.heap import keep_freed_memory

COUNTED_STEP = 1
"""The first step that begins with optimizer states; without a GPU, plain training's tensors are counted during it."""


class RunRecord(Callback):
    """Keeps losses and the peak of device memory, with any strategy.

    Without a GPU plain training has the heap of the emulated device, too: otherwise that would be part of what is
    compared, until the record is collected.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.device_peak = 0
        """Bytes, as a system monitor shows them; without a GPU those of all tensors."""
        self._account: Account | None = None
        if not torch.cuda.is_available():
            weakref.finalize(self, keep_freed_memory())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start counting, in the step and on the machine where that is needed."""
        if len(self.losses) != COUNTED_STEP or torch.cuda.is_available() or engine_of(trainer) is not None:
            return
        states = [s for o in trainer.optimizers for entry in o.state.values() for s in entry.values()]
        self._account = Account()
        self._account.charge(*pl_module.parameters(), *pl_module.buffers())
        self._account.charge(*(s for s in states if isinstance(s, torch.Tensor)))
        self._account.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note loss and peak."""
        engine = engine_of(trainer)
        self.losses.append(float(outputs["loss"]))
        if self._account is not None:
            self._account.__exit__(None, None, None)
            self.device_peak, self._account = self._account.peak, None
        elif engine is not None:
            self.device_peak = max(self.device_peak, engine.stats.device_peak_bytes)
        elif torch.cuda.is_available():
            device = trainer.strategy.root_device
            self.device_peak = torch.cuda.max_memory_reserved(device) + beside_bytes(device)[0]


class Kept(RunRecord):
    """Keeps weights and optimizer states of the end, too, in RAM."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Any] = {}
        self.states: list[Any] = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy both to where no later run changes them."""
        self.weights = _copied(trainer.strategy.lightning_module_state_dict())
        self.states = [_copied(trainer.strategy.optimizer_state(optimizer)) for optimizer in trainer.optimizers]


def engine_of(trainer: Trainer) -> Any:
    """Return the engine of ``trainer``'s strategy; None if it has none."""
    return getattr(trainer.strategy, "engine", None)


def _copied(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, value)
