"""Brings decisions into a device budget with as little harm to their speed as possible. Knows arenas, not solvers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lt_offload.plan.build.copies import device_copies
from lt_offload.plan.build.flexible import FlexibleStay, with_stays
from lt_offload.plan.build.groups import CUTS, GOAL, arrange, runs
from lt_offload.plan.build.pack import Flexible, pack
from lt_offload.plan.build.squeeze import squeeze_arena, squeeze_framework
from lt_offload.plan.iteration.arena import Placement, live_bytes, place
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import framework_bytes
from lt_offload.schema.profile import Profile

_ROUNDS = 1500
_ROUNDS_PER_BUFFER = 10
_FEWER = 3
"""By what the rounds are divided where shorter runs may be tried afterwards."""
_BISECTIONS = 2
_SMALL = 1 / 2000
"""Runs below this part of the arena are placed apart, byte by byte instead of unit by unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Decisions with their arena."""

    decisions: Decisions
    placement: Placement
    over: int
    """Bytes by which they miss the room, not positive if they fit."""


def fit(decisions: Decisions, profile: Profile, room: int) -> Fitted:
    """Return ``decisions`` changed until arena and framework fit into ``room`` bytes, or as near to that as they come.

    Shorter stays cost next to nothing, because copies that are issued later do not start later as long
    as the link is busy. Activations and gradients that leave at once stop the computation, so that comes last.
    """
    best = _fit_arena(decisions, profile, room - _peak(decisions, profile))
    least = squeeze_framework(decisions, profile, 0)
    low, high = _peak(least, profile), _peak(decisions, profile)
    if best.over <= 0 or low == high:
        return best
    smaller = _fit_arena(least, profile, room - low)
    if smaller.over > 0:
        return min(best, smaller, key=lambda item: item.over)
    best = smaller
    for _ in range(_BISECTIONS):
        middle = squeeze_framework(decisions, profile, (low + high) // 2)
        found = _fit_arena(middle, profile, room - _peak(middle, profile))
        if found.over <= 0:
            best, low = found, (low + high) // 2
        else:
            high = (low + high) // 2
    return _relaxed(best, decisions, profile, room)


def _relaxed(fitted: Fitted, wanted: Decisions, profile: Profile, room: int) -> Fitted:
    """Return ``fitted`` with the framework's memory as ``wanted``, as far as its arena leaves room for that."""
    relaxed = squeeze_framework(wanted, profile, room - fitted.placement.extent)
    tensors = tuple(
        replace(packed, grad_release_after=decision.grad_release_after)
        for packed, decision in zip(fitted.decisions.tensors, relaxed.tensors, strict=True)
    )
    return replace(fitted, decisions=replace(fitted.decisions, tensors=tensors, blocks=relaxed.blocks))


def _peak(decisions: Decisions, profile: Profile) -> int:
    return int(framework_bytes(decisions.usage, profile).max())


def _fit_arena(decisions: Decisions, profile: Profile, room: int) -> Fitted:
    """Return ``decisions`` with their arena; stays are shortened only if they waste too much as they are."""
    if room <= 0:
        return _unpacked(decisions, profile, room)
    found: list[Fitted] = []
    for attempt in _attempts(decisions, profile, room):
        found.append(replace(attempt, over=attempt.placement.extent - room) if attempt.over <= 0 else attempt)
        if attempt.over <= 0 and attempt.placement.waste <= GOAL:
            break
    # What fits, with the longest stays unless they waste too much; else what comes nearest to fitting.
    return min(found, key=lambda item: (max(item.over, 0), item.placement.waste))


def _attempts(decisions: Decisions, profile: Profile, room: int) -> Iterator[Fitted]:
    """Yield ways to place ``decisions``, those that change them least first, until there is no hope of a better one."""
    first = _unpacked(decisions, profile, room)
    yield first
    live = first.placement.live_peak
    if live <= room:
        # Less than the room, if that is enough: what is not wasted is left for activations and gradients.
        enough = min(room, int(live * (1 + GOAL)))
        yield _packed(decisions, profile, enough, shorten=False)
        yield _packed(decisions, profile, enough, shorten=True)
        if first.over <= 0:
            return
    decisions = squeeze_arena(decisions, profile, room)
    first = _unpacked(decisions, profile, room)
    live = first.placement.live_peak
    if live > room:  # no stay can be shortened any more
        yield replace(first, over=live - room)
        return
    yield first
    yield _packed(decisions, profile, room, shorten=True)


def _unpacked(decisions: Decisions, profile: Profile, room: int) -> Fitted:
    placement = arrange(decisions, profile)
    return Fitted(decisions=decisions, placement=placement, over=placement.extent - room)


def _packed(decisions: Decisions, profile: Profile, room: int, *, shorten: bool) -> Fitted:
    """Return the longest runs that fit; if none do, the way that comes nearest to that."""
    best: Fitted | None = None
    counts = {cut: len(runs(device_copies(decisions, profile), decisions, profile, cut=cut)) for cut in CUTS}
    different = list({count: cut for cut, count in counts.items()}.values())
    for cut in different:
        rounds = _ROUNDS if cut == different[-1] else _ROUNDS // _FEWER
        found = _pack(decisions, profile, room, cut, shorten=shorten, rounds=rounds)
        if best is None or found.over < best.over:
            best = found
        if best.over <= 0:
            break
    assert best is not None
    return best


def _pack(decisions: Decisions, profile: Profile, room: int, cut: int | None, *, shorten: bool, rounds: int) -> Fitted:
    """Place what is large by packing, the rest below it by first fit."""
    copies = device_copies(decisions, profile)
    parts = runs(copies, decisions, profile, cut=cut)
    steps = 2 * len(profile.blocks)
    large = [part for part in parts if part.interval is not None and part.room >= _SMALL * room]
    small = [part for part in parts if part.interval is None or part.room < _SMALL * room]
    below = place([part.lifetime(steps) for part in small], steps)
    for part, offset in zip(small, below.offsets, strict=True):
        part.put(offset)
    intervals = [FlexibleStay(part, decisions, profile) for part in large]
    lifetimes = [interval.lifetimes() if shorten else [(interval.start, interval.end)] for interval in intervals]
    flexible = [
        Flexible(part.room, tuple(interval.steps_of(life) for life in found))
        for part, interval, found in zip(large, intervals, lifetimes, strict=True)
    ]
    packed = pack(flexible, steps, room - below.extent, rounds=min(rounds, _ROUNDS_PER_BUFFER * len(large)))
    for part, interval, offset, found, chosen in zip(
        large, intervals, packed.offsets, lifetimes, packed.lifetimes, strict=True
    ):
        part.put(below.extent + offset)
        interval.start, interval.end = found[chosen]
    decisions = with_stays(
        decisions, copies, [*intervals, *(FlexibleStay(p, decisions, profile) for p in small if p.interval)]
    )
    offsets = tuple(copy.offset for copy in copies)
    extent = max((copy.offset + copy.room for copy in copies), default=0)
    live = live_bytes([copy.lifetime(steps) for copy in device_copies(decisions, profile)], steps)
    over = packed.missing or extent - room
    return Fitted(decisions=decisions, placement=Placement(offsets, extent, int(live.max(initial=0))), over=over)
