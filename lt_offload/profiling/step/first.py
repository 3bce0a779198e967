"""The first step of a training, which counts: it is watched, its blocks are measured, and there is a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload.machine.driver import context_bytes, current
from lt_offload.model.blocks import Structure
from lt_offload.model.state.generators import generators_kept
from lt_offload.profiling.assemble import assemble
from lt_offload.profiling.machine import MeasuredMachine
from lt_offload.profiling.meters import Stopwatch
from lt_offload.profiling.optimizer import UpdateSizes
from lt_offload.profiling.step.watched import WatchedStep
from lt_offload.schema.profile import Profile


class FirstStep(WatchedStep):
    """The first step of a model's training."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        optimizer: Optimizer,
        device: torch.device,
        machine: MeasuredMachine,
        **watched: Any,
    ) -> None:
        super().__init__(model, structure, device, Stopwatch(device), **watched)
        self._optimizer, self.machine = optimizer, machine

    def host_room(self, budget: int) -> int:
        """Return the RAM that training leaves for activations, of ``budget`` bytes, wherever its states are."""
        sizes = UpdateSizes(self._optimizer, self.device, scratch_ratio=0.0)
        host = (p.nbytes + (p.nbytes + sizes.state(p) if p.requires_grad else 0) for p in self.model.parameters())
        return max(0, budget - self.machine.hardware.process_bytes - sum(host))

    def profile(self, parts: int, optimizer: Optimizer | None = None) -> Profile:
        """Measure the blocks and return the profile; to be called when the backward has come to the first block.

        ``parts``: of the batch. ``optimizer``: that is to be used, with all weights that train now; None: that of the
        step.

        Raises:
            ModelError, UnsupportedError: if the model cannot be trained exactly.
            OverBudget: if a GPU has no memory for one block of the batch.
        """
        gpus = [self.device.index] if self.device.type == "cuda" else []
        # Blocks draw while they are measured: the training would go on with other numbers than without measuring.
        with current(self.device), generators_kept(gpus), torch.enable_grad():
            self.reached()
            return self.measure(parts, optimizer or self._optimizer)

    def measure(self, parts: int, optimizer: Optimizer) -> Profile:
        """Return the profile of the observed step, with weights as ``optimizer`` has them."""
        measured, device = self.costs(parts, unfrozen=optimizer is not self._optimizer), self.device
        hardware, updates, contention = self.machine
        if device.type == "cuda":  # by now all kernels are there
            hardware = replace(hardware, context_bytes=max(hardware.context_bytes, context_bytes(device)))
        ratio = updates.scratch_ratio if device.type == "cuda" else 0.0
        sizes = UpdateSizes(optimizer, device, scratch_ratio=ratio)
        profile = assemble(self.model, self.batch, measured, sizes=sizes, updates=updates, hardware=hardware)
        return replace(profile, contention=contention)
