"""Runs a plan on paper: four lanes that work through their ops in order, and a thread that issues them.

An op starts when its lane is free, everything in ``after`` has ended, and the issuing thread has come to it. The
thread waits for nothing; each computation costs it the block's launch time. Several iterations are unrolled, the last
ones are reported.
"""

from __future__ import annotations

from lt_offload.errors import PlanError
from lt_offload.plan.memory import device_bytes, host_bytes
from lt_offload.plan.schedule import Op, Plan
from lt_offload.plan.trace import Span, Trace
from lt_offload.profile.types import Profile

_WARM_UP = 2
_MEASURED = 2


def simulate(plan: Plan, profile: Profile) -> Trace:
    """Return the iteration that ``plan`` would do in the steady state on the machine of ``profile``.

    Raises:
        PlanError: if an op waits for something that cannot have happened before.
    """
    _require_progress(plan)
    launch = [
        profile.blocks[op.block].launch_s if op.kind == "forward" or _runs(op, profile) else 0.0 for op in plan.ops
    ]
    lanes = dict.fromkeys(("compute", "h2d", "d2h", "host"), 0.0)
    before = [0.0] * len(plan.ops)
    thread = 0.0
    finished = [0.0]
    start: list[float] = []
    for _ in range(_WARM_UP + _MEASURED):
        start, end = [], [0.0] * len(plan.ops)
        for op, cost in zip(plan.ops, launch, strict=True):
            ready = max([thread, *((end if other < op.id else before)[other] for other in op.after)])
            thread += cost
            if op.resource == "none":
                start.append(ready)
                end[op.id] = ready
                continue
            begin = max(ready, lanes[op.resource])
            # The last kernel of a computation cannot run before it has been launched.
            end[op.id] = max(begin + op.seconds, thread if cost else 0.0)
            lanes[op.resource] = end[op.id]
            start.append(begin)
        finished.append(lanes["compute"])
        before = end
    return _trace(plan, profile, start, before, finished)


def _runs(op: Op, profile: Profile) -> bool:
    return op.kind == "backward" and profile.blocks[op.block].has_backward


def _trace(plan: Plan, profile: Profile, start: list[float], end: list[float], finished: list[float]) -> Trace:
    memory = device_bytes(plan, profile)
    origin = min(start)
    computations = [op for op in plan.ops if op.kind in ("forward", "backward")]
    return Trace(
        source="simulated",
        iteration_time=(finished[-1] - finished[-1 - _MEASURED]) / _MEASURED,
        device_peak=int(memory.max()),
        host_peak=host_bytes(plan.options, plan.update_places, profile),
        budget_bytes=plan.budget_bytes,
        spans=tuple(
            Span(op=op.id, lane=op.resource, label=label(op), start=start[op.id] - origin, end=end[op.id] - origin)
            for op in plan.ops
            if op.resource != "none"
        ),
        memory=tuple((max(0.0, start[op.id] - origin), int(memory[op.step])) for op in computations),
    )


def label(op: Op) -> str:
    """Return what people call ``op``, e.g. ``"prefetch weight 4"``."""
    return " ".join(part for part in (op.kind, op.payload, str(op.block)) if part)


def _require_progress(plan: Plan) -> None:
    """Raise for an op that waits for an op which does not exist or is issued later."""
    issued: set[int] = set()
    known = {op.id for op in plan.ops}
    for op in plan.ops:
        for other in op.after:
            if other not in known:
                raise PlanError(f"op {op.id} ({label(op)}) waits for op {other}, which the plan does not have")
            if other < op.id and other not in issued:
                late = next(o for o in plan.ops if o.id == other)
                raise PlanError(
                    f"deadlock: op {op.id} ({label(op)}) waits for op {other} ({label(late)}), which is issued after it"
                )
        issued.add(op.id)
