"""The plan for a Trainer's steps: profiled with its own step, with room for its evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lt_offload.errors import InfeasibleError
from lt_offload.hf import evaluation
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
"""Plans that are made to find out what has to be left free for evaluations."""


def profile_and_plan(run: Run, batch: Any, budget: int) -> tuple[Profile | None, Plan, Structure]:
    """Measure a step with ``batch``, plan for ``budget``, and return the blocks that the plan is for, too.

    Raises:
        InfeasibleError: if it is too small; says what is needed.
        UnsupportedError, ModelError: if the model cannot be trained exactly.
    """
    settings, trainer = run.settings, run.trainer
    check_memory(settings.budget, run.device)
    check_host_memory(Budget.of(settings.host_memory, setting="host_memory").nbytes)
    structure, device = prepare(run.model, run.optimizer, blocks=settings.blocks, accelerator=str(run.device))
    step = TrainingStep(trainer, run.model)
    if settings.plan is not None:
        plan = Plan.load(settings.plan)
        check_replay(plan, settings.budget, {}, settings.micro_batches)
        structure = check_use(
            run.model,
            batch,
            device=device,
            optimizer=run.optimizer,
            structure=structure,
            run=step,
            micro_batches=plan.parts,
        )
        return None, plan, structure
    measured: dict[int, Profile] = {}
    # States are in RAM by now where the run goes on, from a checkpoint or by another plan.
    known = run.profile or run.before.measured(run.device, processes=1, machines=1)

    def profile(parts: int) -> Profile:
        # Solving again, with more in reserve, asks for the same figures.
        if parts not in measured:
            found = measure(
                run.model,
                batch,
                optimizer=run.optimizer,
                device=device,
                structure=structure,
                run=step,
                micro_batches=parts,
                **as_measured(known, run.optimizer),
            )
            measured[parts] = found if known is None else replace(found, contention=known.contention)
        return measured[parts]

    planning, count = run.planning, run.before.parts(settings.micro_batches)
    evaluated = evaluation.device_bytes(run)
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
                f"per_device_eval_batch_size (it is {trainer.args.per_device_eval_batch_size})"
            )
        raise
    return profiled, plan, as_called(run.model, profiled.blocks)


def _with_reserve(profile: Profile, nbytes: int) -> Profile:
    return replace(profile, shared_bytes=profile.shared_bytes + nbytes)


def _reserve(solve: Callable[[int, int], tuple[Profile, Plan]], budget: int, evaluated: int) -> int:
    """Return the bytes that the arena of a plan has to leave free beside what training leaves, for evaluations.

    Where ``budget`` is too small it is the least that is not: what the error will say is enough then.
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
