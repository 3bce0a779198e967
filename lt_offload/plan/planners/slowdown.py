"""The slowdown of lanes in a plan because they share the host's memory, for the clock of the schedule.

A schedule goes through an iteration lane by lane; what the lanes take from each other is known once it is simulated. So
its clock uses speeds that are slower by what the last simulation has shown on average.
"""

from __future__ import annotations

import math

from lt_offload.plan.iteration.durations import slowed
from lt_offload.plan.verify.lanes import COMPUTE, D2H, H2D, HOST, rates
from lt_offload.schema.lanes import MACHINE_LANES
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace

Factors = tuple[float, ...]
"""Factors by which the work of each lane takes longer than alone, in the order of ``MACHINE_LANES``."""


def is_near(factors: Factors, others: Factors, part: float) -> bool:
    """Return whether no lane differs by more than ``part``."""
    return all(abs(a - b) <= part * max(a, b) for a, b in zip(factors, others, strict=True))


def with_slower_lanes(profile: Profile, factors: Factors) -> Profile:
    """Return ``profile`` with lanes slower by ``factors``: each speed is that of one lane."""
    compute, h2d, d2h, host = (factors[lane] for lane in (COMPUTE, H2D, D2H, HOST))
    return slowed(profile, compute=compute, device=compute, h2d=h2d, d2h=d2h, host=host)


def shares(profile: Profile) -> bool:
    """Return whether lanes can slow each other down: some does while all are busy."""
    rate = rates(profile.contention, (1 << len(MACHINE_LANES)) - 1)
    return any(rate[lane] != 1 for lane in range(len(MACHINE_LANES)))


def expected(profile: Profile, busy_s: tuple[float, ...]) -> Factors:
    """Return how slow lanes with so much work are on average if they are busy at independent times.

    Args:
        profile: what lanes take from each other.
        busy_s: seconds of work of each lane, alone, in the order of ``MACHINE_LANES``.
    """
    slow = [1.0] * len(MACHINE_LANES)
    busy = [rates(profile.contention, mask) for mask in range(1 << len(MACHINE_LANES))]
    for _ in range(_ROUNDS):
        taken = [seconds * factor for seconds, factor in zip(busy_s, slow, strict=True)]
        part = [seconds / max(taken) if max(taken) else 0.0 for seconds in taken]
        for lane, alone in enumerate(busy_s):
            mean = 0.0
            for mask, rate in enumerate(busy):
                if mask >> lane & 1:
                    # The chance that just these lanes are busy, if each is at moments of its own.
                    others = (part[o] if mask >> o & 1 else 1 - part[o] for o in range(len(MACHINE_LANES)) if o != lane)
                    mean += rate[lane] * math.prod(others)
            slow[lane] = 1 / mean if alone else 1.0
    return tuple(slow)


def slower(plan: Plan, trace: Trace) -> Factors:
    """Return how much longer the work of each lane took in ``trace``, a simulation of ``plan``."""
    alone, taken = ({lane.name: 0.0 for lane in MACHINE_LANES} for _ in range(2))
    for op in plan.ops:
        if op.lane in alone:
            alone[op.lane] += op.seconds
    for span in trace.spans:
        if span.lane in taken:
            taken[span.lane] += span.end - span.start
    pairs = zip(alone.values(), taken.values(), strict=True)
    return tuple(max(1.0, longer / least) if least else 1.0 for least, longer in pairs)


_ROUNDS = 6
"""Rounds towards a fixed point: how busy lanes are depends on how slow they are."""
