"""Brings decisions into a device budget with as little harm to their speed as possible. Knows arenas, not solvers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lt_offload.plan.arena import Placement, live_bytes, place
from lt_offload.plan.build import place_copies
from lt_offload.plan.choices import Choices
from lt_offload.plan.copies import device_copies
from lt_offload.plan.flexible import FlexibleStay, with_stays
from lt_offload.plan.memory import framework_bytes
from lt_offload.plan.pack import Flexible, pack
from lt_offload.plan.squeeze import squeeze_arena, squeeze_framework
from lt_offload.profile.types import Profile

_ROUNDS = 1500
_ROUNDS_PER_BUFFER = 10
_BISECTIONS = 2
_SMALL = 1 / 2000
"""Buffers below this part of the arena are placed apart, byte by byte instead of unit by unit."""
_HOPELESS = 1.3
"""Live bytes, after squeezing, of an arena's room beyond which packing is not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Choices with their arena."""

    choices: Choices
    placement: Placement
    over: int
    """Bytes by which they miss the room, not positive if they fit."""


def fit(choices: Choices, profile: Profile, room: int) -> Fitted:
    """Return ``choices`` changed until arena and framework fit into ``room`` bytes, or as near to that as they come.

    Shorter stays cost next to nothing, because copies that are issued later do not start later as long
    as the link is busy. Activations and gradients that leave at once stop the computation, so that comes last.
    """
    best = _fit_arena(choices, profile, room - _peak(choices, profile))
    least = squeeze_framework(choices, profile, 0)
    low, high = _peak(least, profile), _peak(choices, profile)
    if best.over <= 0 or low == high:
        return best
    smaller = _fit_arena(least, profile, room - low)
    if smaller.over > 0:
        return min(best, smaller, key=lambda item: item.over)
    best = smaller
    for _ in range(_BISECTIONS):
        middle = squeeze_framework(choices, profile, (low + high) // 2)
        found = _fit_arena(middle, profile, room - _peak(middle, profile))
        if found.over <= 0:
            best, low = found, (low + high) // 2
        else:
            high = (low + high) // 2
    return _relaxed(best, choices, profile, room)


def _relaxed(fitted: Fitted, wanted: Choices, profile: Profile, room: int) -> Fitted:
    """Return ``fitted`` with the framework's memory as ``wanted``, as far as its arena leaves room for that."""
    relaxed = squeeze_framework(wanted, profile, room - fitted.placement.extent)
    tensors = tuple(
        replace(packed, grad_until=choice.grad_until)
        for packed, choice in zip(fitted.choices.tensors, relaxed.tensors, strict=True)
    )
    return replace(fitted, choices=replace(fitted.choices, tensors=tensors, blocks=relaxed.blocks))


def _peak(choices: Choices, profile: Profile) -> int:
    return int(framework_bytes(choices.usage, profile).max())


def _fit_arena(choices: Choices, profile: Profile, room: int) -> Fitted:
    placement = place_copies(choices, profile)
    if placement.extent <= room or room <= 0:
        return Fitted(choices=choices, placement=placement, over=placement.extent - room)
    squeezed = squeeze_arena(choices, profile, room)
    placement = place_copies(squeezed, profile)
    if placement.extent <= room or placement.live_peak > _HOPELESS * room:
        return Fitted(choices=squeezed, placement=placement, over=placement.extent - room)
    return _pack(squeezed, profile, room)


def _pack(choices: Choices, profile: Profile, room: int) -> Fitted:
    """Place what is large by packing, the rest below it by first fit."""
    steps = 2 * len(profile.blocks)
    copies = device_copies(choices, profile)
    stays = {at: FlexibleStay(copy, choices, profile) for at, copy in enumerate(copies) if copy.stay is not None}
    large = [at for at in stays if copies[at].room >= _SMALL * room]
    small = [at for at in range(len(copies)) if at not in set(large)]
    below = place([copies[at].lifetime(steps) for at in small], steps)
    lifetimes = [stays[at].lifetimes() for at in large]
    flexible = [
        Flexible(copies[at].room, tuple(stays[at].steps_of(life) for life in found))
        for at, found in zip(large, lifetimes, strict=True)
    ]
    packed = pack(flexible, steps, room - below.extent, rounds=min(_ROUNDS, _ROUNDS_PER_BUFFER * len(large)))
    offsets = [0] * len(copies)
    for at, offset in zip(small, below.offsets, strict=True):
        offsets[at] = offset
    for at, offset, found, chosen in zip(large, packed.offsets, lifetimes, packed.lifetimes, strict=True):
        offsets[at] = below.extent + offset
        stays[at].start, stays[at].end = found[chosen]
    choices = with_stays(choices, list(stays.values()))
    final = device_copies(choices, profile)
    extent = max((offset + copy.room for offset, copy in zip(offsets, copies, strict=True)), default=0)
    live = live_bytes([copy.lifetime(steps) for copy in final], steps)
    over = packed.missing or extent - room
    return Fitted(choices=choices, placement=Placement(tuple(offsets), extent, int(live.max())), over=over)
