"""Plans that need no program: everything on the device, and everything streamed.

The first is the best there is where it fits. The second needs the least memory there is: it says from which budget on
a model can be trained at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import (
    Decisions,
    Interval,
    TensorDecision,
    resident_tensors,
    stays_between,
    uses,
)
from lt_offload.plan.iteration.memory import aligned, backward_steps, budget_for, framework_bytes, state_room
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.ladder import ladder
from lt_offload.plan.planners.request import Allowed, Request, held_bytes, self_contained
from lt_offload.plan.planners.tables import lookups, with_lookups
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, OptionProfile, Profile, TensorProfile


def no_offload_s(profile: Profile, window: int = 1) -> float:
    """Return the seconds of an iteration, or of a ``window`` of passes, with everything on the device.

    Nothing is recomputed or copied, and the device updates, by one kernel where there is one for the optimizer.
    """
    computing = 0.0
    for block in profile.blocks:
        # A block may not offer to keep everything: then its fastest option counts.
        keep = next((option for option in block.options if option.name == "keep"), None)
        option = keep or min(block.options, key=lambda option: option.forward_s + option.backward_s)
        computing += option.forward_s + (option.backward_s if block.has_backward else 0.0)
    trained = sum(tensor.bytes for tensor in profile.tensors if tensor.trainable)
    optimizer = profile.optimizer
    return window * computing + trained / max(optimizer.device_bytes_per_s, optimizer.fused_bytes_per_s)


def resident_decisions(profile: Profile, allowed: Allowed) -> Iterator[tuple[Decisions, int]]:
    """Yield choices that keep weights and states on the device and copy nothing, with their device bytes.

    The fastest come first; activations are recomputed where that costs the least. Nothing is yielded if a block has
    only options that copy.
    """
    offers = tuple(tuple(o for o in options if not o.offload_bytes) for options in self_contained(allowed))
    if not all(offers):
        return
    tensors = resident_tensors(profile)
    arena = sum(aligned(tensor.bytes) + state_room(tensor.state_bytes) for tensor in profile.tensors)
    steps = ladder(profile, offers)
    for count in range(len(steps.rungs) + 1):
        decisions = Decisions(tensors=tensors, options=steps.after(count))
        yield decisions, budget_for(arena + int(framework_bytes(decisions.usage(profile), profile).max()), profile)


def streaming_decisions(profile: Profile, options: tuple[OptionName, ...], *, host_update: bool) -> Decisions:
    """Return choices that drop every weight after each use and fetch it for the next.

    Args:
        profile: the model.
        options: one per block.
        host_update: update on the host; else on the device, with states that are fetched for it.
    """
    tensors = tuple(_streamed(tensor, profile, host_update=host_update) for tensor in profile.tensors)
    return Decisions(tensors=tensors, options=options)


def _streamed(tensor: TensorProfile, profile: Profile, *, host_update: bool) -> TensorDecision:
    if not tensor.trainable:
        return TensorDecision(place="none", stays=_short_stays(tensor.blocks, profile, stale=False))
    stays = _short_stays(tensor.blocks, profile, stale=host_update)
    if host_update:
        return TensorDecision(place="host", stays=stays)
    update = backward_steps(tensor.blocks, profile)[-1]
    place: UpdatePlace = "paged" if tensor.state_bytes else "device"
    return TensorDecision(place=place, stays=stays, write_back=update if stays else None)


def _short_stays(blocks: tuple[int, ...], profile: Profile, *, stale: bool) -> tuple[Interval, ...]:
    """Return the shortest stays around the uses; ``stale``: what the last backward leaves must go in any case."""
    steps = len(timeline(profile))
    needed = uses(blocks, profile)
    update = (backward_steps(blocks, profile) or [-1])[-1]
    # A stay ends at a use after which the tensor goes, and the next begins with the use that follows the
    # gap. Gaps of no step are none, unless the host makes the device's copy stale in it.
    gaps = [
        (use, following)
        for use, following in zip(needed, [*needed[1:], needed[0] + steps], strict=True)
        if (stale and use == update) or following > use + 1
    ]
    return stays_between(gaps, steps)


def smallest(profile: Profile, allowed: Allowed, *, host_update: bool, host_budget: int | None) -> Sets | None:
    """Return the streaming sets with the smallest device peak within ``host_budget``; None if all need more RAM.

    Frozen embeddings are copied, too, unless they may be read in host memory and need less of the device so.
    """
    streaming, looked_up = list[Sets](), lookups(profile)
    for options in option_sets(profile, allowed):
        for on_host in (True, False) if host_update else (False,):
            streamed = streaming_decisions(profile, options, host_update=on_host)
            if host_budget is None or streamed.least_host_bytes(profile) <= host_budget:
                ways = (streamed, with_lookups(streamed, profile)) if looked_up else (streamed,)
                streaming += (Sets(decisions, profile) for decisions in ways)
    return min(streaming, key=lambda sets: sets.room_needed, default=None)


def smallest_for(request: Request) -> Sets | None:
    """Return the smallest streaming sets by the switches and within the RAM of ``request``."""
    update, ram = request.settings.host_update, request.host_budget_bytes
    return smallest(request.profile, request.allowed, host_update=update, host_budget=ram)


def fits(request: Request) -> bool:
    """Return whether some plan for ``request`` fits, of whatever planner."""
    least = smallest_for(request)
    return least is not None and least.device_bytes <= request.budget_bytes


def option_sets(profile: Profile, allowed: Allowed) -> list[tuple[OptionName, ...]]:
    """Return ways to choose one option per block: what holds the least, has the lowest peaks, needs no RAM."""
    pairs = list(zip(profile.blocks, self_contained(allowed), strict=True))
    # No single measure tells which needs the least: with long sequences peaks count, with little RAM copies.
    sets: list[tuple[OptionName, ...]] = [
        tuple(
            min(options, key=lambda o: (held_bytes(b, o), o.backward_peak_bytes, _seconds(o))).name
            for b, options in pairs
        ),
        tuple(min(options, key=lambda o: held_bytes(b, o) + o.backward_peak_bytes).name for b, options in pairs),
        tuple(min(options, key=lambda o: (o.offload_bytes, held_bytes(b, o))).name for b, options in pairs),
        tuple(min(options, key=lambda o: (o.offload_bytes, o.backward_peak_bytes)).name for b, options in pairs),
    ]
    return list(dict.fromkeys(sets))


def _seconds(option: OptionProfile) -> float:
    return option.forward_s + option.backward_s
