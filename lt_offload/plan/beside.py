"""Plans of several processes whose updates do not wait for the gradients of all, beside those whose updates do.

On one machine an update on the host may begin as soon as its own gradients are there in all processes: such a plan has
no update on the device, where sums of processes would be collectives in the middle of the backward. Where that costs
more than waiting does, the plan that waits is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.iteration.durations import gathered, slowed
from lt_offload.plan.planners.priced import fastest, priced
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile

_SLOWER = 1e4
"""So many times slower updates on the device count where none are allowed: proposals have few."""


def has_choice(profile: Profile, settings: Settings) -> bool:
    """Return whether updates of several processes may wait or not."""
    several = profile.processes * profile.machines > 1
    return several and not settings.delayed


def plan_processes(profile: Profile, settings: Settings, plan_one: Callable[[Profile, Settings], Plan]) -> Plan:
    """Return the faster of two plans: updates wait for the gradients of all processes, or do not and are on the host.

    With ``settings.hosted`` it is the latter.

    Args:
        profile: of one of the processes.
        settings: budgets and switches.
        plan_one: plans for each kind; its errors are passed on.
    """
    if settings.hosted:
        return _beside(profile, settings, plan_one)
    waiting = replace(settings, delayed=True)
    if not _may_run_beside(profile, settings):
        return plan_one(profile, waiting)
    # Two plans share the user's time.
    half = settings.solver_time_limit / 2
    plans: list[Plan] = []
    problem: InfeasibleError | None = None
    try:
        plans.append(plan_one(profile, replace(waiting, solver_time_limit=half)))
    except InfeasibleError as error:
        problem = error
    try:
        plans.append(_beside(profile, replace(settings, hosted=True, solver_time_limit=half), plan_one))
    except InfeasibleError as error:
        # Where neither fits, the error that asks for less memory helps more.
        if problem is not None:
            raise min(error, problem, key=_needed) from None
    except (ConfigError, UnsupportedError):
        if problem is not None:
            raise problem from None
    return fastest(plans)


def _needed(error: InfeasibleError) -> int:
    return (error.needed_bytes or 0) + (error.needed_host_bytes or 0)


def _may_run_beside(profile: Profile, settings: Settings) -> bool:
    """Return whether processes can carry such a plan out: see ``execute/updates/arrivals.py``."""
    owned = profile.common_updates and profile.machines == 1 and not profile.added_up_first
    return owned and profile.forwards == 1 and settings.host_update and settings.planner not in ("resident", "pofo")


def _beside(profile: Profile, settings: Settings, plan_one: Callable[[Profile, Settings], Plan]) -> Plan:
    """Return the plan whose updates are on the host, each as soon as its gradients are there."""
    # No table is updated in two parts.
    tensors = tuple(replace(tensor, lookup_bytes=0) for tensor in profile.tensors)
    planned = replace(slowed(profile, device=_SLOWER), tensors=tensors)
    if settings.accumulate == 1:
        planned = _with_gathering(planned)
    plan = plan_one(planned, settings)
    plan = priced(plan, profile)
    note = "each update begins when its gradients are there in all processes; all are on the host"
    return replace(plan, notes=(*plan.notes, note))


def _with_gathering(profile: Profile) -> Profile:
    """Return ``profile`` with updates on the host that are slower by the owners' adding up."""
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    updated = sum(tensor.bytes for tensor in trained)
    if not updated:
        return profile
    factor = 1 + sum(gathered(tensor, profile) for tensor in trained) / updated
    # This says, too, that updates do not add up: no op is to last longer by that a second time.
    return replace(slowed(profile, host=factor), added_up_first=True)
