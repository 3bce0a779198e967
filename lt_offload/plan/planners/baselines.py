"""Plans that need no program: everything on the device, and everything streamed.

The first is the best there is where it fits. The second needs the least memory there is: it says from which budget on
a model can be trained at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import (
    BlockDecision,
    Decisions,
    Interval,
    TensorDecision,
    block_decisions,
    resident_tensors,
    uses,
)
from lt_offload.plan.iteration.memory import aligned, backward_steps, budget_for, framework_bytes, state_room
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.ladder import ladder
from lt_offload.plan.planners.request import Allowed, held_bytes, self_contained
from lt_offload.schema.profile import OptionName, OptionProfile, Profile


def no_offload_s(profile: Profile) -> float:
    """Return the seconds of an iteration with everything on the device.

    Nothing is recomputed or copied, and the device updates.
    """
    compute = 0.0
    for block in profile.blocks:
        keep = next((option for option in block.options if option.name == "keep"), None)
        option = keep or min(block.options, key=lambda option: option.forward_s + option.backward_s)
        compute += option.forward_s + (option.backward_s if block.has_backward else 0.0)
    trained = sum(tensor.bytes for tensor in profile.tensors if tensor.trainable)
    return compute + trained / profile.optimizer.device_bytes_per_s


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
    found = ladder(profile, offers)
    for count in range(len(found.rungs) + 1):
        blocks = tuple(BlockDecision(option=option) for option in found.after(count))
        decisions = Decisions(tensors=tensors, blocks=blocks)
        yield decisions, budget_for(arena + int(framework_bytes(decisions.usage, profile).max()), profile)


def streaming_decisions(
    profile: Profile, options: tuple[OptionName, ...], *, host_update: bool, lead: int = 0, lag: int = 0
) -> Decisions:
    """Return choices that drop every weight after each use and fetch it ``lead`` steps before the next.

    Args:
        profile: the model.
        options: one per block.
        host_update: update on the host; else on the device, with states that are fetched for it.
        lead: 1 lets copies run beside the computation before; 0 needs the least memory.
        lag: 1 lets activations and gradients leave beside the next computation.
    """
    tensors = tuple(
        TensorDecision(place="none", intervals=_short_intervals(tensor.blocks, profile, lead, stale=False))
        if not tensor.trainable
        else _streamed(profile, index, host_update, lead, lag)
        for index, tensor in enumerate(profile.tensors)
    )
    return Decisions(tensors=tensors, blocks=block_decisions(profile, options, lag=lag, lead=lead))


def _streamed(profile: Profile, index: int, host_update: bool, lead: int, lag: int) -> TensorDecision:
    tensor, last = profile.tensors[index], len(timeline(profile)) - 1
    update = backward_steps(tensor.blocks, profile)[-1]
    intervals = _short_intervals(tensor.blocks, profile, lead, stale=host_update)
    if host_update:
        return TensorDecision(place="host", intervals=intervals, grad_release_after=min(update + lag, last))
    decision = TensorDecision(place="device", intervals=intervals, write_back=update if intervals else None)
    if not tensor.state_bytes:
        return decision
    return replace(
        decision, place="paged", state_interval=Interval(start=update - lead, end=update), state_offload_after=update
    )


def _short_intervals(blocks: tuple[int, ...], profile: Profile, lead: int, *, stale: bool) -> tuple[Interval, ...]:
    """Return the shortest intervals around the uses; ``stale``: what the last backward leaves must go in any case."""
    steps = len(timeline(profile))
    needed = uses(blocks, profile)
    update = (backward_steps(blocks, profile) or [-1])[-1]
    moves: list[tuple[int, int]] = []
    for use, following in zip(needed, [*needed[1:], needed[0] + steps], strict=True):
        fetch = max(following - lead, use + 1)
        if (stale and use == update) or fetch > use + 1:
            moves.append((use, fetch))
    return tuple(
        Interval(start=fetch % steps, end=moves[(at + 1) % len(moves)][0] % steps)
        for at, (_, fetch) in enumerate(moves)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Smallest:
    """The streaming plan that needs the least device memory."""

    decisions: Decisions
    device_bytes: int
    host_bytes: int


def smallest(profile: Profile, allowed: Allowed, *, host_update: bool, host_budget: int | None) -> Smallest | None:
    """Return the streaming plan with the smallest device peak within ``host_budget``; None if all need more RAM."""
    found: list[Smallest] = []
    for options in option_sets(profile, allowed):
        for on_host in (True, False) if host_update else (False,):
            decisions = streaming_decisions(profile, options, host_update=on_host)
            ram = decisions.least_host_bytes(profile)
            if host_budget is None or ram <= host_budget:
                needed = budget_for(Sets(decisions, profile).room_needed, profile)
                found.append(Smallest(decisions=decisions, device_bytes=needed, host_bytes=ram))
    return min(found, key=lambda item: item.device_bytes, default=None)


def option_sets(profile: Profile, allowed: Allowed) -> list[tuple[OptionName, ...]]:
    """Return ways to choose one option per block: what holds the least, has the lowest peaks, needs no RAM."""
    pairs = list(zip(profile.blocks, self_contained(allowed), strict=True))
    found: list[tuple[OptionName, ...]] = [
        tuple(
            min(options, key=lambda o: (held_bytes(b, o), o.backward_peak_bytes, _seconds(o))).name
            for b, options in pairs
        ),
        tuple(min(options, key=lambda o: held_bytes(b, o) + o.backward_peak_bytes).name for b, options in pairs),
        tuple(min(options, key=lambda o: (o.offload_bytes, held_bytes(b, o))).name for b, options in pairs),
        tuple(min(options, key=lambda o: (o.offload_bytes, o.backward_peak_bytes)).name for b, options in pairs),
    ]
    return list(dict.fromkeys(found))


def _seconds(option: OptionProfile) -> float:
    return option.forward_s + option.backward_s
