"""Profile and plan of a run under a Trainer, and in how many parts its batches go through each block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lt_offload.errors import ConfigError
from lt_offload.model.parts import check_micro_batches as check_number
from lt_offload.plan import Settings
from lt_offload.plan.orders import choose_parts, compared
from lt_offload.strategy import replay, sample
from lt_offload.strategy.batch_size import warn_of_change
from lt_offload.strategy.replay import Before
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import Profile
    from lt_offload.strategy.offmate import OffmateStrategy


def check_micro_batches(value: object, batch_size: object) -> None:
    """Refuse what is no number of parts, and the choice of a batch size that would not know of them.

    Raises:
        ConfigError: naming the value.
    """
    check_number(value, auto=True)
    if value != 1 and batch_size == "auto":
        raise ConfigError(
            f"micro_batches={value!r} cannot be combined with batch_size='auto', which plans for whole batches in each "
            "block; give batch_size as a number, or set micro_batches=1"
        )


def profile_and_plan(
    strategy: OffmateStrategy,
    trainer: Any,
    batch: sample.SampleBatch,
    before: Before,
    budget: int,
    make_plan: Callable[[Profile, Settings], Plan],
) -> tuple[Profile, Plan, bool]:
    """Measure a training step of ``trainer`` and return it with its plan, or with the saved one.

    Also returns whether the first iterations are to correct it, which ``make_plan`` sees to by itself.

    Args:
        strategy: with its optimizer.
        trainer: about to run its first step.
        batch: to be measured.
        before: the run that this one continues.
        budget: bytes of the device.
        make_plan: plans for a profile with settings.

    Raises:
        ConfigError: if there are fewer samples than ``micro_batches``.
    """
    (optimizer,) = strategy.optimizers
    before.warn_of_frozen(trainer.lightning_module)
    count, path = strategy.micro_batches, strategy.plan_path
    each = strategy.together(
        lambda: before.measured(strategy.root_device, processes=strategy.num_processes, machines=strategy.num_nodes)
    )
    # The first one's, as the profile that all have then is.
    known = each[0] if None not in each else None

    def measure(parts: int) -> Profile:
        again = partial(sample.measure, trainer, optimizer, batch, **replay.as_measured(known, optimizer))
        measured = partial(again, micro_batches=parts)
        with sample.isolated(strategy.namespace):
            found = strategy.one_profile(measured, known=None if known is None else known.hardware)
        return found if known is None else replace(found, contention=known.contention)

    if path is not None:
        # In the plan's own number of parts, which the setting may leave open.
        profile = measure(replay.load_plan(path, budget, micro_batches=count).parts)
        warn_of_change(before.batch_size, profile.batch_size)
        return profile, replay.replay(path, profile, budget), False
    settings: Settings = replace(strategy.settings, memory=budget)
    count = before.parts(count)
    profile = measure(1 if count == "auto" else count)
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
        choice = choose_parts(lambda parts: first if parts == 1 else measure(parts), settings)
        profile, plan = choice.profile, choice.plan
    return profile, strategy.of_first(lambda: compared(plan, profile, settings)), count == "auto"
