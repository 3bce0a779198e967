"""Plans that must stay as they are: 6 profiles, every planner, with a clock that stands still.

``python -m tests.support.profiles.golden_plans`` writes ``golden_plans.json`` again, which is only right where plans
were meant to change. A digest covers all that a plan tells the engine; the figures beside it say what changed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.plan import Op, Plan, solve
from tests.unit.plan.test_planner_bounds import PLANNERS, rich_profile

FILE = Path(__file__).with_suffix(".json")
SEEDS = range(6)
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


def normal_form(plan: Plan) -> list[Any]:
    """Return what the plan tells the engine, free of how it is written down."""
    ops = [
        (op.kind, op.step, op.block, op.lane, op.payload, _tensors(plan, op), _slot(plan, op))
        + (op.bytes, f"{op.seconds:.9e}", op.after, op.release_after, op.save, plan.zero_copy(op))
        for op in plan.ops
    ]
    initial = sorted(
        (plan.groups[copy.group].payload, tensor, offset)
        for copy in plan.initial
        for tensor, offset in plan.groups[copy.group].offsets(copy.offset)
    )
    return [plan.options, plan.update_places, initial, plan.arena_bytes, plan.gradient_bytes, ops]


def _tensors(plan: Plan, op: Op) -> list[tuple[int, int | None]]:
    """Return the tensors of ``op``, and where they go in the arena."""
    placed = [
        (tensor, offset if op.offsets else None)
        for group, start in zip_longest(op.groups, op.offsets, fillvalue=0)
        for tensor, offset in plan.groups[group].offsets(start)
    ]
    return sorted(placed)


def _slot(plan: Plan, op: Op) -> int | None:
    return plan.groups[op.groups[0]].host_offset if op.payload == "grad" else None


def planned(seed: int, planner: Any, **settings: Any) -> Plan:
    """Plan profile ``seed``; errors as :func:`lt_offload.solve`."""
    profile = rich_profile(seed)
    everything = sum(2 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    with clock_stopped():
        return solve(profile, memory=int(SHARES[seed % len(SHARES)] * everything), planner=planner, **settings)


def row(seed: int, planner: Any) -> dict[str, Any]:
    """Return the figures and the digest of one plan."""
    try:
        plan = planned(seed, planner)
    except (InfeasibleError, UnsupportedError) as error:
        return {"error": type(error).__name__}
    written = json.dumps(normal_form(plan), sort_keys=True).encode()
    return {
        "planner": plan.planner,
        "iteration_s": float(f"{plan.predicted.iteration_s:.9g}"),
        "lower_bound_s": float(f"{plan.predicted.lower_bound_s:.6g}"),
        "device_peak_bytes": plan.predicted.device_peak_bytes,
        "host_peak_bytes": plan.predicted.host_peak_bytes,
        "ops": len(plan.ops),
        "digest": hashlib.sha256(written).hexdigest()[:16],
    }


if __name__ == "__main__":
    rows = {f"{seed} {planner}": row(seed, planner) for seed in SEEDS for planner in PLANNERS}
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
