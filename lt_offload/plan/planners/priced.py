"""A plan's figures on the machine of a profile, which may be another one than it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.planners.baselines import no_offload_s
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
        no_offload_s=no_offload_s(profile, plan.window),
        device_peak_bytes=trace.device_peak,
        host_peak_bytes=trace.host_peak,
    )
    return replace(plan, predicted=predicted)


def fastest(plans: Sequence[Plan], *, proved: bool = True) -> Plan:
    """Return the fastest of ``plans`` of several kinds, with a bound that no plan of any kind beats.

    ``proved``: False if of one kind there is no plan.
    """
    bound = min(plan.predicted.lower_bound_s for plan in plans)
    best = min(plans, key=lambda plan: plan.predicted.iteration_s)
    proved = proved and all(plan.predicted.proved for plan in plans)
    return replace(best, predicted=replace(best.predicted, lower_bound_s=bound, proved=proved))
