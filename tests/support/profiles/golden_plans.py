"""Plans of 20 profiles by every planner, with a clock that stands still: ``scripts.net`` compares them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lt_offload.plan import Plan, solve
from tests.unit.plan.test_planner_bounds import rich_profile

SEEDS = range(20)
SHARES = (0.45, 0.8, 1.6)


@contextmanager
def clock_stopped() -> Iterator[None]:
    """No search ends because of the time it took, so that the same profile gives the same plan."""
    real = time.monotonic
    time.monotonic = lambda: 0.0
    try:
        yield
    finally:
        time.monotonic = real


def planned(seed: int, planner: Any, **settings: Any) -> Plan:
    """Plan profile ``seed``; errors as :func:`lt_offload.solve`."""
    profile = rich_profile(seed)
    everything = sum(2 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    with clock_stopped():
        return solve(profile, memory=int(SHARES[seed % len(SHARES)] * everything), planner=planner, **settings)
