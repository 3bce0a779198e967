"""Times and places of all copies: the result of scheduling, from which ops are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lt_offload.plan.assembly.copies import DeviceCopy

if TYPE_CHECKING:
    from lt_offload.plan.assembly.sets import Sets


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationTimes:
    """Times at which the activations of a block travel."""

    release_after: int
    """The step at whose end they have left the device."""
    prefetch_at: int
    """The step in which they are fetched back."""
    turn: int
    """Orders the copies of that step; see ``DeviceCopy.turn``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """Times and places of all copies."""

    sets: Sets
    copies: tuple[DeviceCopy, ...]
    arena_bytes: int
    """Extent of the arena."""
    activations: Mapping[int, ActivationTimes]
    """Per block whose activations are offloaded."""
    gradients: Mapping[int, int]
    """Per tensor whose gradient is copied to the host: the step at whose end its device memory is free."""
    seconds: float
    """Duration of the iteration, by the clock of the schedule."""
