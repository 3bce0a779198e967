"""Measurements before the first step: the machine, with what has been loaded by then, and updates by the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload.machine.accounting import storage_bytes
from lt_offload.machine.driver import current, use_expandable_segments
from lt_offload.model import optimizers as states
from lt_offload.model.quantized import tensors_of
from lt_offload.profiling.contention import measure_contention
from lt_offload.profiling.hardware import measure_hardware, taken_host_bytes
from lt_offload.profiling.optimizer import measure_optimizer
from lt_offload.schema.profile import Contention, HardwareProfile, OptimizerProfile


class MeasuredMachine(NamedTuple):
    """The machine that steps are measured on."""

    hardware: HardwareProfile
    updates: OptimizerProfile
    """Cost of updates by the optimizer."""
    contention: Contention
    """Slowdown of lanes by each other."""


def measure_machine(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    hardware: HardwareProfile | None = None,
    updates: OptimizerProfile | None = None,
    say: Callable[[str], None],
) -> MeasuredMachine:
    """Measure the machine, updates and the slowdown of lanes by each other, as far as they are not known."""
    if device.type == "cuda":
        use_expandable_segments(device)  # as the device does: what the allocator wastes is measured
    machine = hardware or _with_model(measure_hardware(device, on_progress=say), model, optimizer)
    contention = Contention()
    with current(device):
        if updates is None:
            say("measuring the optimizer")
            updates = measure_optimizer(optimizer, device)
        if hardware is None:
            say("measuring how copies, updates and computations slow each other down")
            contention = measure_contention(optimizer, device, host_threads=updates.host_threads)
            machine = _alone(machine, contention)
    return MeasuredMachine(machine, updates, contention)


def _alone(machine: HardwareProfile, contention: Contention) -> HardwareProfile:
    """Return ``machine`` with the speeds of copies in one direction alone, if ``contention`` says the rest."""
    # Speeds beside the other direction have its slowdown in them, which `contention` would count a second time.
    h2d, d2h = machine.h2d_alone_bytes_per_s, machine.d2h_alone_bytes_per_s
    if not contention.slowdowns or not h2d or not d2h:
        return machine
    return replace(machine, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)


def _with_model(machine: HardwareProfile, model: nn.Module, optimizer: Optimizer) -> HardwareProfile:
    """Return ``machine`` without the RAM that weights and optimizer states take already: plans count them anyway."""
    held = (tensor for state in states.of_parameters(optimizer) for tensor in states.tensors_of(state).values())
    on_host = storage_bytes(tensor for tensor in (*tensors_of(model), *held) if tensor.device.type == "cpu")
    taken = taken_host_bytes()
    # Of weights that are pages of a file, some may never have been read.
    return replace(machine, process_bytes=max(taken.all - on_host, taken.private - min(taken.private, on_host)))
