"""Advice beside a plan: the other order of accumulation, what binds, and updates that would be faster per token.

*Micro-batch-major* (``accumulate``): a forward and backward of the whole model for one micro-batch, then for the next;
every pass fetches all weights that do not stay. *Layer-major* (``micro_batches``): all of them through one block, then
through the next; weights travel once, but activations of all are there between forward and backward.

The order that was not measured is priced by a profile that is derived from the other's: good enough to say which wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.batch.profiles import in_parts, layer_major, micro_batch_major, scaled
from lt_offload.plan.batch.splits import Split
from lt_offload.plan.iteration.durations import least_computing_s
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import least_s, make_plan, relaxed_s
from lt_offload.schema.explain import BINDS
from lt_offload.schema.lanes import LANE
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_seconds

_SHARE = 0.25
"""Part of the time limit that may go into a plan that is only compared."""
_LEAST_S = 1.0
_LARGER = (2, 4, 8)
"""Updates of so many times the samples are estimated."""
_WORTH = 1.3
"""A larger update is named if it trains so many times the tokens per second, and ..."""
_MORE = 1.15
"""... an even larger one if it trains so many times the tokens of the one before."""


def compared(plan: Plan, profile: Profile, settings: Settings, *, thorough: bool = False) -> Plan:
    """Return ``plan`` with notes about what binds, larger updates, and the other order of accumulation, if it has one.

    Args:
        plan: of the order that was measured.
        profile: what it is for.
        settings: what it was made with.
        thorough: plan the other order if it may be faster; otherwise only its lower bound is known.
    """
    budget = max(_LEAST_S, _SHARE * settings.solver_time_limit)
    quick = replace(settings, solver_time_limit=min(settings.solver_time_limit, budget))
    said = (f"{BINDS}{'; '.join((_binding(plan, profile), *_larger(plan, profile, quick)))}",)
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
        return replace(plan, notes=(*plan.notes, *said))
    verdict = _verdict(how, way, mine, other, quick, thorough=thorough)
    return replace(plan, notes=(*plan.notes, *said, verdict))


def _binding(plan: Plan, profile: Profile) -> str:
    shares = {LANE[name].title: share for name, share in plan.busy.items()}
    shares["the RAM's bandwidth"] = sum(share * profile.contention.of(name) for name, share in plan.busy.items())
    calls = ((op, count) for op, count in zip(plan.ops, plan.counts, strict=True) if op.kind in ("forward", "backward"))
    launched = sum(count * profile.blocks[op.block].launch_s for op, count in calls)
    shares["launching kernels"] = launched / plan.predicted.iteration_s
    name, share = max(shares.items(), key=lambda pair: pair[1])
    return f"{name}, {min(share, 1.0):.0%} busy"


def _larger(plan: Plan, profile: Profile, settings: Settings) -> Iterator[str]:
    """Yield the gain of a larger update, in words, if one is worth it; by relaxed programs, and so an estimate."""
    split = Split(plan.batch_size * plan.accumulate, plan.accumulate, plan.parts)
    mine = plan.predicted.iteration_s / split.samples
    if mine < _WORTH * profile.forwards * least_computing_s(profile) / plan.batch_size:
        return  # no update trains so much more
    # Plans are as much slower than their programs for other sizes.
    slower = max(1.0, mine / promised_s(profile, split, settings))
    best, gain = split, 1.0
    for factor in _LARGER:
        samples = factor * split.samples
        ways = (
            split._replace(samples=samples),
            *([split._replace(samples=samples, parts=factor * split.parts)] if not profile.deferred_forwards else []),
            split._replace(samples=samples, accumulate=factor * split.accumulate),
        )
        times = ((way, promised_s(profile, way, settings)) for way in ways)
        way, seconds = next(((way, seconds) for way, seconds in times if seconds < math.inf), (split, math.inf))
        faster = mine / (slower * seconds)
        if faster < _MORE * gain:
            break
        best, gain = way, faster
    if gain >= _WORTH:
        size = plan.processes * best.samples * plan.sequence_length
        units = "tokens" if plan.sequence_length > 1 else "samples"
        yield (
            f"about {gain:.1f} times the {units} per second with {size:,} {units} per update: {best.settings} (an "
            "estimate; it changes the training)"
        )


def promised_s(profile: Profile, split: Split, settings: Settings) -> float:
    """Return the seconds per sample of ``split`` in its relaxed program, with an estimate of its profile.

    Infinity where nothing fits.
    """
    wanted = replace(settings, accumulate=split.accumulate)
    sized = in_parts(scaled(profile, split.batch_size), split.parts)
    return relaxed_s(sized, wanted) / split.samples


def _verdict(how: str, way: str, mine: float, other: Profile, settings: Settings, *, thorough: bool) -> str:
    """Return the time of the other order, in words, and the settings for it where it may be faster."""
    least = least_s(other, settings) or settings.accumulate * other.forwards * least_computing_s(other)
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
