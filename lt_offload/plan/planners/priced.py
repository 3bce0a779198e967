"""A plan's figures on the machine of a profile, which may be another one than it was made for, within its budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.planners.baselines import computing_s, fused_update_s
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes


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


def within_budgets(plan: Plan, profile: Profile, settings: Settings) -> Plan:
    """Return ``plan``, found for looser budgets, with those of ``settings``."""
    machine = profile.hardware
    return replace(plan, budget_bytes=settings.device_budget(machine), host_budget_bytes=settings.host_budget(machine))


def notes_on_ram(profile: Profile, ram: int) -> Iterator[str]:
    """Yield what to know about the RAM of a plan, ``ram`` bytes."""
    if profile.processes > 1:
        what = "frozen weights" + (", those that the host updates and their states" if profile.common_updates else "")
        yield (
            f"RAM is that of one of {profile.processes} processes, {format_bytes(profile.processes * ram)} for all: of "
            f"what they have in common ({what}) each counts its part"
        )
    hardware = profile.hardware
    pinnable, needed = hardware.pinnable_bytes, ram - hardware.process_bytes
    # Without a limit of its own it is all that was measured as free, of which a host_memory by hand may be more.
    if hardware.host_bytes - hardware.process_bytes > pinnable and needed > pinnable:
        yield (
            f"only {format_bytes(pinnable)} of RAM may be pinned of the {format_bytes(needed)} that are needed: "
            f"copies of the other {format_bytes(needed - pinnable)} are slower than predicted"
        )
