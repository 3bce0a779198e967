"""The batches that steps have shown what to plan for, and those that have outgrown them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lt_offload.distributed.merge import largest
from lt_offload.model.batch import Size, shape
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile


class Growth:
    """The batches that there is room for: of each, or of one that is larger, a step has shown what it takes.

    Args:
        sizes: of those that steps of a run before have shown.
    """

    def __init__(self, sizes: Iterable[Size] = ()) -> None:
        self.sizes = [*sizes]
        """Two of them need not cover one that is as long as the one and padded as the other."""

    def add(self, size: Size, found: Profile, before: Profile | None) -> Profile:
        """Return the profile to plan for when a step has shown its own.

        Args:
            size: of its batch.
            found: its profile.
            before: what was planned for before it, perhaps in a run before.
        """
        if not self.sizes or before is None or before.fingerprint != found.fingerprint or before.parts != found.parts:
            self.sizes = [size]
            return found
        self.sizes.append(size)
        return largest([before, found])

    def outgrown(self, plan: Plan, batch: object, padded: bool | None = None) -> str | None:
        """Return why ``plan`` may have no room for ``batch``; None if it should have.

        Args:
            plan: for what steps have shown.
            batch: that comes.
            padded: whether it has padding, if that is known.
        """
        size, found = Size.of(batch, padded), plan.predicted
        ratio = min((known.ratio(size) for known in self.sizes), default=1.0)
        if ratio <= 1 or (
            math.isfinite(ratio)
            and found.device_peak_bytes * ratio <= plan.budget_bytes
            and found.host_peak_bytes * ratio <= plan.host_budget_bytes
        ):
            return None
        return f"a batch of {shape(batch)} comes, and none as large was planned for"
