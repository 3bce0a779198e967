"""Profile and plan of a run under a Trainer, and the number of parts in which its batches go through each block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from lightning_utilities.core.rank_zero import rank_zero_info

from lt_offload.errors import ConfigError, PlanError
from lt_offload.model.parts import check_micro_batches as check_number
from lt_offload.plan import Settings
from lt_offload.plan.orders import choose_parts, compared
from lt_offload.schema.files import from_json
from lt_offload.schema.plan import PLAN_SCHEMA, Plan
from lt_offload.strategy import replay
from lt_offload.strategy.batch_size import warn_of_change
from lt_offload.strategy.first import sample
from lt_offload.strategy.replay import Before
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from lt_offload.model.batch import Size
    from lt_offload.model.blocks import Structure
    from lt_offload.schema.profile import Profile
    from lt_offload.strategy.first.planning import FirstPlanning


def check_micro_batches(value: object, batch_size: object) -> None:
    """Refuse values that are no number of parts, and several parts together with ``batch_size="auto"``.

    Raises:
        ConfigError: naming the value.
    """
    check_number(value, auto=True)
    if value != 1 and batch_size == "auto":
        raise ConfigError(
            f"micro_batches={value!r} cannot be combined with batch_size='auto', which plans for whole batches in each "
            "block; give batch_size as a number, or set micro_batches=1"
        )


def surveyable(strategy: FirstPlanning, trainer: Any, structure: Structure, size: Size) -> bool:
    """Return whether the first step of ``trainer`` may run before there is a plan, and count.

    Args:
        strategy: of the Trainer.
        trainer: about to train.
        structure: the candidates for the model's blocks.
        size: of the coming batch.
    """
    # A step that calls other layers trains without a plan, by which nobody adds up its gradients to those of others.
    adds_up = strategy.is_distributed or strategy.settings.accumulate > 1
    return (one_list(structure) or not adds_up) and not sample.wants_larger(trainer, size)


class OrderOfSums(TypedDict):
    """The choices that decide about the order of sums in a step without a plan."""

    parts: int
    """Parts of the batch, which go through each block in turn."""
    chunk: int | None
    """Tokens that the output projection and the loss take at a time, 0: as many as suit; None: all."""


def order_of_sums(
    settings: Settings,
    micro_batches: int | Literal["auto"],
    path: str | Path | None,
    before: Before,
    plan: Plan | None,
) -> OrderOfSums:
    """Return the order of sums in a step without a plan: that of the run's plan, as far as it is known.

    Args:
        settings: of plans.
        micro_batches: parts that are wanted; where their number is yet to be chosen, the step has one.
        path: of a saved plan that is to be used.
        before: the run that this one continues.
        plan: of an earlier step of this one.
    """
    if path is not None:
        plan = Plan.load(path)
    elif plan is None and before.plan is not None:
        with suppress(PlanError):  # the run is planned again, and says why
            plan = from_json(Plan, before.plan, source="the checkpoint's plan", schema=PLAN_SCHEMA)
    parts, chunk = plan.parts if plan is not None else before.micro_batches or 1, 0 if settings.chunked_loss else None
    if plan is not None and plan.chunk_tokens:
        chunk = plan.chunk_tokens
    return {"parts": parts if micro_batches == "auto" else micro_batches, "chunk": chunk}


def one_list(structure: Structure) -> bool:
    """Return whether the model has no other candidate for its blocks."""
    return structure.other is None or structure.other() is None


def known_machine(strategy: FirstPlanning, before: Before) -> Profile | None:
    """Return the profile of the run that ``strategy`` continues, if it holds for all processes of this one."""
    each = strategy.together(
        lambda: before.measured(strategy.root_device, processes=strategy.num_processes, machines=strategy.num_nodes)
    )
    # The first one's, as the profile that all have then is.
    return each[0] if None not in each else None


def profile_and_plan(
    strategy: FirstPlanning,
    measure: Callable[[int], Profile],
    known: Profile | None,
    before: Before,
    budget: int,
    make_plan: Callable[[Profile, Settings], Plan],
) -> tuple[Profile, Plan, bool]:
    """Measure a training step and return it with its plan, or with the saved one.

    Also returns whether the first iterations are to correct it, which ``make_plan`` sees to by itself.

    Args:
        strategy: with its optimizer.
        measure: returns the profile of a step whose batch goes through each block in so many parts.
        known: an earlier profile of the machine.
        before: the run that this one continues.
        budget: bytes of the device.
        make_plan: plans for a profile with settings.

    Raises:
        ConfigError: if there are fewer samples than ``micro_batches``.
    """
    count, path = strategy.micro_batches, strategy.plan_path

    def profiled(parts: int) -> Profile:
        new = strategy.one_profile(partial(measure, parts), known=None if known is None else known.hardware)
        return new if known is None else replace(new, contention=known.contention)

    if path is not None:
        # In the plan's own number of parts, which the setting may leave open.
        profile = profiled(replay.load_plan(path, budget, micro_batches=count).parts)
        warn_of_change(before.batch_size, profile.batch_size)
        return profile, replay.replay(path, profile, budget), False
    settings: Settings = replace(strategy.settings, memory=budget)
    count = before.parts(count)
    profile = profiled(1 if count == "auto" else count)
    warn_of_change(before.batch_size, profile.batch_size)
    own = before.own_plan(profile, strategy.settings, budget)
    if own is not None:
        return profile, own, True
    in_ram = " (in RAM, beside host_memory: the device is emulated)" if strategy.root_device.type == "cpu" else ""
    rank_zero_info(f"offmate: planning for {format_bytes(budget)}{in_ram}, {settings.time_limit:g} s at most")
    if count != "auto":
        plan = make_plan(profile, settings)
    else:
        first = profile
        choice = choose_parts(lambda parts: first if parts == 1 else profiled(parts), settings)
        profile, plan = choice.profile, choice.plan
    return profile, strategy.of_first(lambda: compared(plan, profile, settings)), count == "auto"
