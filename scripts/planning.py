"""What measuring scripts ask the planner: the smallest budget, what streams all, the best plan. Imports no torch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from lt_offload import Plan, Profile, Trace, simulate
from lt_offload.plan import check
from lt_offload.plan.assembly.just_in_time import Missed, Scheduler
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.assembly.work import LaneWork
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.schema.lanes import MACHINE_LANES

NO_LIMIT_S = 1e5
"""A time limit that never ends a search, so that a busy machine finds the same plans."""


@dataclass
class Stopwatch:
    """Seconds since it was made, by the clock and of the processor."""

    began: float = field(default_factory=time.perf_counter)
    worked: float = field(default_factory=time.process_time)

    def figures(self) -> dict[str, float]:
        """Return both."""
        return {"plan_s": time.perf_counter() - self.began, "plan_cpu_s": time.process_time() - self.worked}


def model_bytes(profile: Profile) -> int:
    """Return the bytes of weights, gradients and optimizer states."""
    return sum(t.bytes * (2 if t.trainable else 1) + t.state_bytes for t in profile.tensors)


def busy(trace: Trace) -> dict[str, float]:
    """Return the seconds of an iteration for which each lane is busy."""
    return {lane.name: trace.busy(lane.name) for lane in MACHINE_LANES}


def gap(plan: Plan) -> float | None:
    """Return by which part of its bound ``plan`` is above it; None where time was up before the bound was known."""
    return plan.predicted.gap if plan.predicted.proved else None


def figures_of(plan: Plan) -> dict[str, Any]:
    """Return what is compared of plans."""
    return {
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "device_peak_bytes": plan.predicted.device_peak_bytes,
        "host_peak_bytes": plan.predicted.host_peak_bytes,
        "iteration_s": plan.predicted.iteration_s,
        "lower_bound_s": plan.predicted.lower_bound_s,
        "no_offload_s": plan.predicted.no_offload_s,
        "gap": gap(plan),
        "ops": len(plan.ops),
    }


def shown(gap: float | None) -> str:
    """Return a gap in words."""
    return "not proved" if gap is None else f"{gap:.1%}"


def worst(gap: float | None) -> float:
    """Return a gap as it is sorted: what is not proved comes after all others."""
    return math.inf if gap is None else gap


def just_in_time(sets: Sets, profile: Profile, capacity_bytes: int) -> Timetable | Missed:
    """Return the fastest schedule found for ``sets`` within ``capacity_bytes``, with the speeds of ``profile``."""
    search = Scheduler(LaneWork(sets, profile), capacity_bytes)
    start = search.start()
    return start if isinstance(start, Missed) else search.finish()


def scheduled(name: str, decisions: Decisions, profile: Profile) -> Plan:
    """Return the plan of ``decisions`` that has room for what a step needs and for what the next one does."""
    sets = Sets(decisions, profile)
    found = just_in_time(sets, profile, sets.room_needed + sets.least_arena)
    assert not isinstance(found, Missed), f"{name} needs {found.device} more bytes"
    room, ram = profile.hardware.device_bytes, profile.hardware.host_bytes
    return build(found, profile, planner=name, budget_bytes=room, host_budget_bytes=ram)


def stream_all(profile: Profile) -> Plan:
    """Return the plan in which every weight travels and the host updates all, one step ahead; activations are kept."""
    options = ("keep",) * len(profile.blocks)
    plan = scheduled("stream all", streaming_decisions(profile, options, host_update=True), profile)
    trace = simulate(plan, profile)
    predicted = replace(
        plan.predicted,
        iteration_s=trace.iteration_time,
        device_peak_bytes=trace.device_peak,
        host_peak_bytes=trace.host_peak,
    )
    # The prediction may be off by a few per cent; the budget is hard.
    plan = replace(plan, predicted=predicted, budget_bytes=round(1.05 * trace.device_peak))
    problems = check(plan, profile)
    assert not problems, problems[0]
    return plan


def describe(plan: Plan, profile: Profile) -> dict[str, Any]:
    """Return what matters of a plan beside measured figures; shares are of all weight bytes."""
    fetched = {t for op in plan.ops if op.kind == "prefetch" and op.payload == "weight" for t in plan.tensors(op)}
    sizes = [tensor.bytes for tensor in profile.tensors]
    on_host = (size for size, place in zip(sizes, plan.update_places, strict=True) if place == "host")
    return {
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "predicted_s": plan.predicted.iteration_s,
        "predicted_peak_bytes": plan.predicted.device_peak_bytes,
        "gap": gap(plan),
        "weights_streamed": sum(sizes[t] for t in fetched) / sum(sizes),
        "updated_on_host": sum(on_host) / sum(sizes),
    }
