"""The gain by a little more of each resource, as planned again for a machine that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.iteration.durations import slowed, with_faster_link
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes

Solver = Callable[[Profile, int, int], Plan]
"""Returns the best plan for a profile, a device budget and a host budget in bytes."""

MORE_MEMORY = 10**9
MORE_RAM = 8 * 10**9
FASTER_LINK = 1.5
FASTER_UPDATE = 2.0
_ALL_RAM = 0.9
"""A plan that takes less of the RAM than this is not short of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """One change of the machine and the plan for it."""

    change: str
    """e.g. ``"1 GB more device memory"``."""
    iteration_s: float
    lower_bound_s: float
    note: str = ""
    """The reason for which nothing was solved, if nothing was."""


def gains(plan: Plan, profile: Profile, solve: Solver, *, say: Callable[[str], None] | None = None) -> tuple[Gain, ...]:
    """Return the gains by more device memory, more RAM, a faster link and faster updates on the host.

    A plan stays valid where there is more of something, so no change makes it slower.

    Args:
        plan: the plan to compare with.
        profile: what it was made for.
        solve: finds a plan; should have the switches that ``plan`` was found with.
        say: is told what is being solved.
    """
    memory, ram = plan.budget_bytes, plan.host_budget_bytes
    link = f"a link {FASTER_LINK:g} times as fast"
    update = f"host updates {FASTER_UPDATE:g} times as fast"
    changes = []
    for change, machine, device, host in (
        (f"{format_bytes(MORE_MEMORY)} more device memory", profile, memory + MORE_MEMORY, ram),
        (f"{format_bytes(MORE_RAM)} more RAM", profile, memory, ram + MORE_RAM),
        (link, with_faster_link(profile, FASTER_LINK), memory, ram),
        (update, slowed(profile, host=1 / FASTER_UPDATE), memory, ram),
    ):
        if say is not None:
            say(f"planning with {change}")
        changes.append(_gain(change, plan, machine, device, host, solve))
    return tuple(changes)


def _gain(change: str, plan: Plan, profile: Profile, memory: int, ram: int, solve: Solver) -> Gain:
    now = plan.predicted

    def unchanged(note: str) -> Gain:
        return Gain(change=change, iteration_s=now.iteration_s, lower_bound_s=now.lower_bound_s, note=note)

    if ram > plan.host_budget_bytes and now.host_peak_bytes < _ALL_RAM * plan.host_budget_bytes:
        return unchanged(f"{format_bytes(now.host_peak_bytes)} of {format_bytes(plan.host_budget_bytes)} are needed")
    try:
        predicted = solve(profile, memory, ram).predicted
    except (InfeasibleError, ConfigError):  # a plan is there, so it is only that none was found in time
        return unchanged("no other plan was found in time")
    # The search may end, within its time, with a plan slower than the present one, which stays valid.
    return Gain(
        change=change,
        iteration_s=min(predicted.iteration_s, now.iteration_s),
        lower_bound_s=min(predicted.lower_bound_s, now.lower_bound_s),
    )
