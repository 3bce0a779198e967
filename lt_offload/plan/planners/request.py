"""What a planner is asked, and what it answers: decisions that may still have to be fitted into the budget."""

from __future__ import annotations

from dataclasses import dataclass

from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import room_within
from lt_offload.schema.profile import OptionProfile, Profile

Allowed = tuple[tuple[OptionProfile, ...], ...]
"""Per block, the options that may be chosen."""


def self_contained(allowed: Allowed) -> Allowed:
    """Return ``allowed`` less the option that needs forwards of other blocks to run again."""
    return tuple(tuple(option for option in options if option.name != "discard") for options in allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One question to a planner; sizes in bytes."""

    profile: Profile
    budget_bytes: int
    """Device budget, context and shared bytes included."""
    host_budget_bytes: int
    allowed: Allowed
    host_update: bool = True
    """Whether the host may update parameters."""
    activation_offload: bool = True
    """Whether activations may be copied to the host."""
    recompute: bool = True
    """Whether activations may be computed again."""
    gradient_reserve: float | None = None
    """MemFerry: the part of the gradient bytes that may be held on the device at a time; None: the planner decides."""
    time_limit: float = 30.0
    """Seconds."""

    @property
    def room(self) -> int:
        """Device bytes that a plan may use for what it decides about."""
        return room_within(self.budget_bytes, self.profile)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Decisions and what to call them."""

    name: str
    """Planner and variant, e.g. ``"greedy, margin of 1 layer"``."""
    decisions: Decisions


class NotApplicable(Exception):
    """A planner has nothing to propose for this request; the message says why, for people, as a clause.

    For example ``"weights and optimizer states need 24.3 GB of the 10 GB on the device"``.
    """
