"""Solutions that no program made: flows are arbitrary, except that the host's share respects what it may be."""

from __future__ import annotations

import numpy as np

from lt_offload.plan.planners.offmate.solution import Flow, Group, GroupFlows, Solution, groups
from lt_offload.schema.profile import Profile


def random_solution(rng: np.random.Generator, profile: Profile) -> Solution:
    """Return random flows for the groups of ``profile`` and a random option for each block."""
    steps = 2 * len(profile.blocks)
    found = groups(profile)
    return Solution(
        groups=found,
        flows=tuple(random_flows(rng, group, steps) for group in found),
        options=tuple(str(rng.choice([o.name for o in block.options])) for block in profile.blocks),  # type: ignore[misc]
        iteration_s=float(steps),
    )


def random_flows(rng: np.random.Generator, group: Group, steps: int) -> GroupFlows:
    def flow() -> Flow:
        """Nothing, everything at one time, or something at several times."""
        values = rng.uniform(0, 1, steps) * (rng.uniform(0, 1, steps) < rng.choice([0.0, 0.2, 0.7]))
        if rng.uniform() < 0.3:
            values = np.zeros(steps)
            values[rng.integers(steps)] = 1.0
        return values / max(values.sum(), 1.0)

    def level() -> Flow:
        return np.full(steps, rng.choice([0.0, rng.uniform(), 1.0])) * rng.uniform(0.5, 1, steps)

    share = float(rng.choice([0.0, rng.uniform(), 1.0])) if group.trainable_bytes else 0.0
    return GroupFlows(
        host_share=share,
        resident=level(),
        prefetch=flow(),
        write_back=flow(),
        state_resident=level(),
    )
