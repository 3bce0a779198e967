"""Requests to planners, and their answers: decisions.

And what all planners ask about a block: which options it may use, and what they hold.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from lt_offload.errors import ConfigError
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import room_within
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.settings import Settings
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile

Allowed = tuple[tuple[OptionProfile, ...], ...]
"""Per block, the options that may be chosen."""


_RECOMPUTING = ("recompute", "mixed", "reload", "discard", "fused", "chunked")


def allowed_options(
    block: BlockProfile, switches: Settings | OffmateConfig, *, discard: bool = False
) -> tuple[OptionProfile, ...]:
    """Return the options of ``block`` that the switches allow; raises ``ConfigError`` if none is left.

    ``discard``: also the option whose activations other blocks' forwards, run again, have to bring back.
    """
    if not block.has_backward:
        # Nothing is saved, recomputed or offloaded: its options differ in name only.
        return block.options[:1]
    left = tuple(
        option
        for option in block.options
        if (option.name != "discard" or discard)
        and (switches.recompute or option.name not in _RECOMPUTING)
        and (switches.activation_offload or option.offload_bytes == 0)
    )
    if not left:
        raise ConfigError(
            f"recompute={switches.recompute} with activation_offload={switches.activation_offload} leaves no option "
            f"for block {block.name}, which offers {', '.join(o.name for o in block.options)}; allow one of them"
        )
    return left


def held_bytes(block: BlockProfile, option: OptionProfile) -> int:
    """Return what ``block`` holds on the device between its forward and its backward."""
    if not block.has_backward:
        return 0
    return option.saved_bytes + (block.input_bytes if option.keeps_input else 0)


def taken_bytes(block: BlockProfile, option: OptionProfile) -> int:
    """Return what a swap of options frees, of two of them the difference: what is held while other blocks run.

    The last block's backward follows its forward, so that what counts there is the most that both hold.
    """
    held = held_bytes(block, option)
    # Only the last block has no output.
    return held if block.output_bytes else held + max(option.forward_peak_bytes, option.backward_peak_bytes)


def self_contained(allowed: Allowed) -> Allowed:
    """Return ``allowed`` less the option that needs forwards of other blocks to run again."""
    return tuple(tuple(option for option in options if option.name != "discard") for options in allowed)


DEFAULTS = Settings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One question to a planner; sizes in bytes."""

    profile: Profile
    budget_bytes: int
    """Device budget, context and shared bytes included."""
    host_budget_bytes: int
    allowed: Allowed
    """Per block: the activation options that the settings leave."""
    settings: Settings = DEFAULTS
    """The switches; budgets are above, in bytes."""
    deadline: float = math.inf
    """The moment, on the monotonic clock, from which on the best plan so far is enough."""
    beat_s: float = math.inf
    """There is a plan that takes so long."""

    @property
    def capacity_bytes(self) -> int:
        """Device bytes that a plan may use for what it decides about."""
        return room_within(self.budget_bytes, self.profile)

    @property
    def late(self) -> bool:
        """True if the time for planning is over."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Decisions, ready to be scheduled, and what to call them."""

    name: str
    """Planner and variant, e.g. ``"greedy, margin of 1 layer"``."""
    sets: Sets

    @property
    def decisions(self) -> Decisions:
        """The decisions that are proposed."""
        return self.sets.decisions


_TOO_LONG = 1.05
"""Estimates are that much too long at most."""


def cannot_win(seconds: float, beat_s: float) -> bool:
    """Return whether a plan that is estimated to take ``seconds`` will not beat ``beat_s`` with any amount of care."""
    return seconds > _TOO_LONG * beat_s


_FAR = 1.15
"""By the clock of a schedule alone, which only expects how lanes slow each other down."""


def far_behind(seconds: float, beat_s: float) -> bool:
    """Return whether a schedule of ``seconds`` by its own clock is not worth a plan: there is one of ``beat_s``."""
    return seconds > _FAR * beat_s


class NotApplicable(Exception):
    """A planner has nothing to propose for this request; the message says why, for people, as a clause.

    For example ``"weights and optimizer states need 24.3 GB of the 10 GB on the device"``.
    """
