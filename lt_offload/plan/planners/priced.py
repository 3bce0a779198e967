"""A plan's figures on the machine of a profile, which may be another one than it was made for."""

from __future__ import annotations

from dataclasses import replace

from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.planners.baselines import computing_s, fused_update_s
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile


def priced(plan: Plan, profile: Profile) -> Plan:
    """Return ``plan``, checked and simulated for ``profile``; its lower bound is at most its time."""
    plan = timed(plan, profile)
    violations = check(plan, profile)
    assert not violations, violations[:3]
    trace = simulate(plan, profile)
    predicted = replace(
        plan.predicted,
        iteration_s=trace.iteration_time,
        lower_bound_s=min(plan.predicted.lower_bound_s, trace.iteration_time),
        no_offload_s=plan.window * computing_s(profile) + fused_update_s(profile),
        device_peak_bytes=trace.device_peak,
        host_peak_bytes=trace.host_peak,
    )
    return replace(plan, predicted=predicted)
