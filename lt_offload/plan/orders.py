"""The two orders in which several micro-batches can be accumulated, priced against each other.

*Micro-batch-major* (``accumulate``): a forward and backward of the whole model for one micro-batch, then for the next;
every pass fetches all weights that do not stay. *Layer-major* (``micro_batches``): all of them through one block, then
through the next; weights travel once, but activations of all are there between forward and backward.

The order that was not measured is priced by a profile that is derived from the other's: good enough to say which wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.batch.profiles import scaled
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import least_s, make_plan
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import COLLECTED_BELOW, BlockProfile, OptionProfile, Profile
from lt_offload.units import format_seconds

_SHARE = 0.25
"""Part of the time limit that may go into a plan that is only compared."""
_LEAST_S = 1.0
_MOST_PARTS = 32
_WORTH = 0.02
"""More parts have to be faster by more than this."""

Measure = Callable[[int], Profile]
"""Returns the profile of a step whose batch is taken in so many parts."""


def in_parts(profile: Profile, count: int) -> Profile:
    """Return ``profile`` as it would be about if the batch went through each block in ``count`` parts.

    Memory that one part at a time needs shrinks with it; the gradients of a block stay until its last part is over. The
    output projection takes the whole batch.
    """
    if count == profile.parts:
        return profile
    blocks = tuple(
        block if block.kind == "head" else _in_parts(block, profile, index, count)
        for index, block in enumerate(profile.blocks)
    )
    return replace(profile, parts=count, blocks=blocks)


def _in_parts(block: BlockProfile, profile: Profile, index: int, count: int) -> BlockProfile:
    ratio = profile.parts / count
    sizes = [tensor.bytes for tensor in profile.tensors if tensor.trainable and index in tensor.blocks]
    large = [size for size in sizes if size >= COLLECTED_BELOW]
    # Large gradients leave one by one; with several parts all are complete with the last, and are there together.
    together = sum(large) - max(large, default=0)
    gradients = together * ((count > 1) - (profile.parts > 1))

    saved = max((option.saved_bytes for option in block.options if option.name == "keep"), default=0)

    def cut(option: OptionProfile) -> OptionProfile:
        moved = option.offload_bytes if option.name in ("offload", "mixed") else 0

        def peak(size: int, *, rebuilt: int = 0, more: int = 0) -> int:
            fixed = min(moved + rebuilt, size)  # is there for all parts
            return max(0, fixed + math.ceil((size - fixed) * ratio) + more)

        return replace(
            option,
            forward_peak_bytes=peak(option.forward_peak_bytes),
            backward_peak_bytes=peak(
                option.backward_peak_bytes, rebuilt=saved if option.name == "discard" else 0, more=gradients
            ),
            held_peak_bytes=None,
            passing_peak_bytes=None,
            before_loss_bytes=None,
        )

    return replace(block, launch_s=block.launch_s / ratio, options=tuple(map(cut, block.options)))


def layer_major(profile: Profile, window: int) -> Profile:
    """Return the profile of one batch that has all samples of ``window`` micro-batches, taken in as many parts."""
    return in_parts(scaled(profile, profile.batch_size * window), profile.parts * window)


def micro_batch_major(profile: Profile) -> Profile:
    """Return the profile of one part of the batch of ``profile``, as a batch of its own."""
    size = math.ceil(profile.batch_size / profile.parts)
    return scaled(in_parts(profile, 1), size)


def compared(plan: Plan, profile: Profile, settings: Settings, *, thorough: bool = False) -> Plan:
    """Return ``plan`` with a note about the time of the other order of accumulation.

    Itself if there is only one: one micro-batch per update, in one part.

    Args:
        plan: of the order that was measured.
        profile: what it is for.
        settings: what it was made with.
        thorough: plan the other order if it may be faster; otherwise only its lower bound is known.
    """
    budget = max(_LEAST_S, _SHARE * settings.time_limit)
    quick = replace(settings, time_limit=min(settings.time_limit, budget))
    mine, count = plan.predicted.iteration_s, profile.parts
    if settings.accumulate > 1:
        window = settings.accumulate
        other, quick = layer_major(profile, window), replace(quick, accumulate=1)
        how = f"layer-major (micro_batches={count * window} with batches of {profile.batch_size * window} samples)"
        # Lightning calls training_step with one batch after the other, so that no strategy can change the order.
        way = (
            f"set batch_size={profile.batch_size * window}, micro_batches={count * window} and "
            "accumulate_grad_batches=1 for it: as many samples per update, which come as one batch, and sums in "
            "another order"
        )
    elif count > 1:
        other, quick = micro_batch_major(profile), replace(quick, accumulate=count)
        how = f"micro-batch by micro-batch (accumulate={count} with batches of {other.batch_size} samples)"
        way = f"set batch_size={other.batch_size}, micro_batches=1 and accumulate_grad_batches={count} for it"
    else:
        return plan
    return replace(plan, notes=(*plan.notes, _verdict(how, way, mine, other, quick, thorough=thorough)))


def _verdict(how: str, way: str, mine: float, other: Profile, settings: Settings, *, thorough: bool) -> str:
    """Return the time of the other order, in words, and the settings for it where it may be faster."""
    least = least_s(other, settings)
    if math.isinf(least):
        return f"{how} was priced, too: no plan of it fits"
    if least >= mine:
        return f"{how} would take at least {_against(least, mine)}"
    if not thorough:
        return (
            f"{how} would take at least {format_seconds(least)} per update, if it fits: at best {mine / least:.2f} "
            f"times as fast as this plan; it was not planned; {way}"
        )
    planned = _seconds(other, settings)
    if planned is None:
        return f"{how} was priced, too: no plan of it was found"
    return f"{how} would take about {_against(planned, mine)}" + (f"; {way}" if planned < mine else "")


def _against(other: float, mine: float) -> str:
    faster = f"{mine / other:.2f} times as fast as this plan"
    slower = f"this plan is {other / mine:.2f} times as fast"
    return f"{format_seconds(other)} per update, {faster if other < mine else slower}"


def _seconds(profile: Profile, settings: Settings) -> float | None:
    try:
        return make_plan(profile, settings).predicted.iteration_s
    except (ConfigError, InfeasibleError, UnsupportedError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsChoice:
    """The number of parts of a batch, ``Profile.parts``, with the plan for it."""

    profile: Profile
    plan: Plan


def choose_parts(measure: Measure, settings: Settings) -> PartsChoice:
    """Return the number of parts, a power of two up to the samples of the batch, with which an iteration is fastest.

    All are priced by the profile of the whole batch; what wins is measured.

    Args:
        measure: is asked for 1 and for what wins.
        settings: of plans.

    Raises:
        InfeasibleError: if no plan fits, in however many parts.
        UnsupportedError: if the model cannot be trained exactly in one part.
    """
    whole = measure(1)
    counts = [1 << power for power in range(_MOST_PARTS.bit_length()) if 1 << power <= whole.batch_size]
    share = max(_LEAST_S, settings.time_limit / (len(counts) + 1))
    quick = replace(settings, time_limit=min(share, settings.time_limit))
    seconds = {count: _seconds(in_parts(whole, count), quick) for count in counts}
    times = {count: time for count, time in seconds.items() if time is not None}
    if not times:
        return PartsChoice(profile=whole, plan=make_plan(whole, settings))
    least = min(times.values())
    # The fewest parts among those that are about as fast: each part launches all kernels once more.
    best = next(count for count, time in times.items() if time <= (1 + _WORTH) * least)
    prices = ", ".join(
        f"{count}: {'does not fit' if time is None else format_seconds(time)}" for count, time in seconds.items()
    )
    try:
        profile = whole if best == 1 else measure(best)
        plan = make_plan(profile, settings)
    except (InfeasibleError, UnsupportedError) as error:
        if best == 1 or 1 not in times:
            raise
        return _chosen(whole, make_plan(whole, settings), f"{prices}; {best} was refused: {error}")
    # The price was of a profile that was derived: kernels of small parts may be slower than in proportion.
    if best > 1 and plan.predicted.iteration_s >= times.get(1, math.inf):
        return _chosen(whole, make_plan(whole, settings), f"{prices}; measured, {best} is not faster")
    return _chosen(profile, plan, prices)


def _chosen(profile: Profile, plan: Plan, why: str) -> PartsChoice:
    note = f"micro_batches={profile.parts} was chosen; seconds per iteration by number of parts: {why}"
    return PartsChoice(profile=profile, plan=replace(plan, notes=(*plan.notes, note)))
