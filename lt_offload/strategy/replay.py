"""A saved plan that is to be used again: whether it is for this model, this batch and this much memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch.optim import Optimizer

from lt_offload.errors import PlanError
from lt_offload.execute.memory.common import check_beside
from lt_offload.execute.program import check_match
from lt_offload.model.blocks import Structure
from lt_offload.plan import Settings, check
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile

ONE_BATCH = Settings()
"""One micro-batch per update, no clipping by norm."""


def load_plan(
    path: str | Path,
    memory: int,
    settings: Settings = ONE_BATCH,
    *,
    micro_batches: int | Literal["auto"] = "auto",
    processes: int = 1,
    machines: int = 1,
) -> Plan:
    """Return the saved plan at ``path``, checked as far as that goes without a model.

    Raises:
        PlanError: if it is no plan, needs more than ``memory`` bytes, has no room for the sums of gradients that
            ``settings`` need, updates before the norm is known by which the run clips, takes batches in another number
            of parts than ``micro_batches``, or updates where the gradients of all ``processes``, on so many
            ``machines``, are not there.
    """
    plan = Plan.load(path)
    if micro_batches not in ("auto", plan.parts):
        raise PlanError(
            f"plan={str(path)!r} has micro_batches={plan.parts}, which decides about the order of sums, and "
            f"micro_batches={micro_batches} is set; set micro_batches={plan.parts} or 'auto', or plan again"
        )
    if not plan.adds_up and settings.accumulate > 1:
        raise PlanError(
            f"plan={str(path)!r} is for 1 micro-batch per update, and accumulate_grad_batches={settings.accumulate} "
            "needs room for sums of gradients; plan again, or set accumulate_grad_batches=1"
        )
    if settings.delayed and not plan.delayed:
        raise PlanError(
            f"plan={str(path)!r} updates weights before the norm of all gradients is known, by which gradient_clip_val "
            "clips, and before on_after_backward and on_before_optimizer_step, where hooks look at them; plan again, "
            "or set gradient_clip_algorithm='value' and leave such hooks out"
        )
    if processes > 1 and not plan.delayed:
        try:
            check_beside(plan, machines=machines)
        except PlanError as error:
            raise PlanError(f"plan={str(path)!r} is not one for devices={processes // machines}: {error}") from None
    if plan.budget_bytes > memory:
        raise PlanError(
            f"plan={str(path)!r} needs memory={plan.budget_bytes}, there are {memory} bytes; raise memory or plan again"
        )
    return plan


def check_no_plan(path: str | Path | None, change: str) -> None:
    """Raise ``PlanError`` if a plan was given, at ``path``, that a ``change`` of weights or optimizer has outdated."""
    if path is not None:
        raise PlanError(
            f"plan={str(path)!r} cannot be carried out any more: {change}; leave plan out, so that the run is planned "
            "again when that happens"
        )


def check_same_model(path: str | Path, structure: Structure, optimizer: Optimizer) -> None:
    """Raise ``PlanError`` if the saved plan at ``path`` is not for a model of ``structure``; needs no profile."""
    try:
        check_match(structure, optimizer, Plan.load(path))
    except PlanError as error:
        raise PlanError(f"plan={str(path)!r}: {error}") from None


def replay(path: str | Path, profile: Profile, memory: int) -> Plan:
    """Return the saved plan at ``path``.

    Raises:
        PlanError: if it is no plan, is of another model, or does not fit today's batch or memory.
    """
    plan = load_plan(path, memory)
    if plan.fingerprint != profile.fingerprint:
        raise PlanError(
            f"plan={str(path)!r} was made for another model ({plan.model}, {len(plan.options)} blocks) or for other "
            f"shapes, dtypes or frozen weights; this is {profile.model} with {len(profile.blocks)} blocks; plan again"
        )
    problems = check(plan, profile)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PlanError(f"plan={str(path)!r} cannot be carried out: {problems[0]}{more}; plan again")
    return plan
