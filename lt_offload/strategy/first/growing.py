"""Sizes of the batches that were profiled, and larger batches, for which the plan may have no room."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lt_offload.distributed.merge import largest
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.model.batch import Size, shape
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile


@dataclass(frozen=True, slots=True)
class Carried:
    """The state that an engine leaves for the engine of the next plan."""

    window: CarriedWindow
    memory: int
    """Bytes of the device."""
    plan: Plan
    change: str
    """The reason for another plan."""


class Growth:
    """The sizes of batches that there is room for: a step with each of them, or a larger one, was profiled."""

    def __init__(self, sizes: Iterable[Size] = ()) -> None:
        self.sizes = [*sizes]
        """Profiled sizes; two of them need not cover a batch that is as long as the one and padded as the other."""

    def add(self, size: Size, profile: Profile, before: Profile | None) -> Profile:
        """Return the profile to plan for, with room for all batches so far.

        ``before`` is the one that was planned for until now, perhaps in an earlier run.
        """
        kinds = [one and (one.fingerprint, one.parts, one.tile_tokens) for one in (before, profile)]
        if not self.sizes or before is None or kinds[0] != kinds[1]:
            self.sizes = [size]
            return profile
        self.sizes.append(size)
        return largest([before, profile])

    def outgrown(self, plan: Plan, batch: object, padded: bool | None = None) -> str | None:
        """Return the reason why ``plan`` may have no room for ``batch``; None if it should have."""
        size, predicted = Size.of(batch, padded), plan.predicted
        ratio = min((known.ratio(size) for known in self.sizes), default=1.0)
        if ratio <= 1 or (
            math.isfinite(ratio)
            and predicted.device_peak_bytes * ratio <= plan.budget_bytes
            and predicted.host_peak_bytes * ratio <= plan.host_budget_bytes
        ):
            return None
        return f"a batch of {shape(batch)} comes, and none as large was planned for"
