"""The parts of an engine that carrying a plan out, replacing the engine and reading host copies have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lt_offload.execute.device.record import Recorder
from lt_offload.execute.iteration import Iteration
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.user_code.checks import InstalledSetup
from lt_offload.execute.user_code.gradient_view import GradientView
from lt_offload.execute.user_code.guard import Guard
from lt_offload.model.blocks import Structure


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """The parts of one engine, from its installation on."""

    structure: Structure
    weights: Sequence[Weight]
    blocks: Sequence[list[Weight]]
    """The weights of each block."""
    recorder: Recorder
    residency: Residency
    iteration: Iteration
    guard: Guard
    setup: InstalledSetup
    view: GradientView
