"""The plan for a Trainer's steps, with room for its evaluations, from a training step or from one run on trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lt_offload.errors import InfeasibleError
from lt_offload.hf.step import TrainingStep
from lt_offload.model.blocks import Structure, as_called
from lt_offload.plan.iteration.memory import room_within
from lt_offload.profiling.hardware import check_host_memory, check_memory
from lt_offload.profiling.measure import check_use
from lt_offload.profiling.measure import profile as measure
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.session import check_replay, prepare, solved
from lt_offload.strategy.replay import as_measured
from lt_offload.units import Budget, format_bytes

if TYPE_CHECKING:
    from lt_offload.hf.run import Run

_TRIES = 12
"""Most plans that are made to find the bytes to leave free for evaluations."""


def prepared(run: Run) -> Structure:
    """Refuse what cannot be trained, and return the candidates for the model's blocks.

    Raises:
        UnsupportedError, ModelError, ConfigError, OverBudget: naming the setting.
    """
    settings = run.settings
    check_memory(settings.budget, run.device)
    check_host_memory(Budget.of(settings.host_memory, setting="host_memory").nbytes)
    return prepare(run.model, run.optimizer, blocks=settings.blocks, accelerator=str(run.device))[0]


def saved_plan(run: Run) -> Plan:
    """Return the plan that is to be used.

    Raises:
        PlanError: if it leaves no room for other settings.
    """
    assert run.settings.plan is not None
    plan = Plan.load(run.settings.plan)
    check_replay(plan, run.settings.budget, {}, run.settings.micro_batches)
    return plan


def plan_aside(run: Run, structure: Structure, batch: Any) -> tuple[Profile | None, Plan, Structure]:
    """Measure a step with ``batch`` on trial, plan, and return profile, plan and the plan's blocks.

    Raises:
        InfeasibleError: if memory is too small; says what is needed.
        UnsupportedError, ModelError: if the model cannot be trained exactly.
    """
    options: dict[str, Any] = {"optimizer": run.optimizer, "device": run.device, "structure": structure}
    options["run"] = TrainingStep(run.trainer, run.model)
    if run.settings.plan is not None:
        plan = saved_plan(run)
        return None, plan, check_use(run.model, batch, **options, micro_batches=plan.parts)
    known = run.known()

    def profile(parts: int) -> Profile:
        return measure(run.model, batch, **options, micro_batches=parts, **as_measured(known, run.optimizer))

    return profile_and_plan(run, profile, known, run.budget)


def profile_and_plan(
    run: Run, step: Callable[[int], Profile], known: Profile | None, budget: int
) -> tuple[Profile, Plan, Structure]:
    """Plan for a step, and return its profile, the plan, and the blocks that this is for.

    Args:
        run: the training.
        step: returns the profile of a step whose batch goes through each block in so many parts.
        known: an earlier profile of the machine.
        budget: bytes of the device.

    Raises:
        InfeasibleError: if that is too small; says what is needed.
    """
    measured: dict[int, Profile] = {}

    def profile(parts: int) -> Profile:
        # Solving again, with more in reserve, asks for the same figures.
        if parts not in measured:
            new = step(parts)
            measured[parts] = new if known is None else replace(new, contention=known.contention)
        return measured[parts]

    planning, evaluated, count = run.planning, run.evaluated, run.before.parts(run.settings.micro_batches)
    if count != "auto":
        own = run.before.own_plan(profile(count), planning, budget, evaluated=evaluated)
        if own is not None:
            return profile(count), own, as_called(run.model, profile(count).blocks)

    def solve(memory: int, reserved: int) -> tuple[Profile, Plan]:
        return solved(
            lambda parts: _with_reserve(profile(parts), reserved),
            replace(planning, memory=memory),
            count,
        )

    reserved = _reserve(solve, budget, evaluated) if evaluated else 0
    try:
        profiled, plan = solve(budget, reserved)
    except InfeasibleError as error:
        if reserved:
            error.add_note(
                f"{format_bytes(reserved)} of it are for evaluations while training; they need less with a smaller "
                f"per_device_eval_batch_size (it is {run.trainer.args.per_device_eval_batch_size})"
            )
        raise
    return _with_reserve(profiled, -reserved), plan, as_called(run.model, profiled.blocks)


def _with_reserve(profile: Profile, nbytes: int) -> Profile:
    return replace(profile, shared_bytes=profile.shared_bytes + nbytes)


def _reserve(solve: Callable[[int, int], tuple[Profile, Plan]], budget: int, evaluated: int) -> int:
    """Return the bytes that the arena of a plan has to leave free for evaluations, beside what training leaves.

    Where ``budget`` is too small they are those for the smallest one that is not, which the error will name.
    """
    reserved = 0
    for _ in range(_TRIES):
        try:
            profile, plan = solve(budget, reserved)
        except InfeasibleError as error:
            if error.needed_bytes is None or error.needed_bytes <= budget:
                return reserved
            budget = error.needed_bytes
            continue
        lacking = evaluated - (room_within(plan.budget_bytes, profile) + reserved - plan.arena_bytes)
        if lacking <= 0:
            return reserved
        # A plan with more in reserve has another arena, which may lack again: until one does not.
        reserved += lacking
    return evaluated  # enough whatever the arena: by small steps it could take thousands of plans
