"""Brings decisions into a device budget with as little harm to their speed as possible.

Device memory has two parts: the arena, which holds weights and optimizer states at fixed offsets, and the framework's
own, for activations and gradients. Whole tensors need more of both than the fractions they were rounded from, in a few
steps. Where something does not fit, it is tightened: what is on its way out is given back earlier, and what is on its
way in takes memory later. What then has memory left is loosened: copies get more time to run beside computations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lt_offload.plan.assembly.copies import DeviceCopy, device_copies
from lt_offload.plan.assembly.groups import CUTS, GOAL, CopyGroup, arrange, runs
from lt_offload.plan.assembly.placement import Flexible, Placement, live_bytes, pack, place
from lt_offload.plan.iteration.decisions import Decisions, Interval, copy_uses
from lt_offload.plan.iteration.memory import Bytes, backward_steps, framework_bytes
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.profile import Profile

_ROUNDS = 1500
_ROUNDS_PER_BUFFER = 10
_FEWER = 3
"""By what the rounds are divided where shorter groups may be tried afterwards."""
_BISECTIONS = 2
_SMALL = 1 / 2000
"""Groups below this part of the arena are placed apart, byte by byte instead of unit by unit."""
_LATER = 8
"""Steps by which a departure is put off at most; longer ones would only fill the link's queue."""
_EARLIER = 2
"""Steps by which an arrival is brought forward at most; what is needed first should come first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Decisions with their arena."""

    decisions: Decisions
    placement: Placement
    over: int
    """Bytes by which they miss the capacity, not positive if they fit."""


def fit(decisions: Decisions, profile: Profile, capacity_bytes: int) -> Fitted:
    """Return ``decisions`` changed until arena and framework fit into ``capacity_bytes``, or come nearest to that.

    Shorter intervals cost next to nothing, because copies that are issued later do not start later as long as the link
    is busy. Activations and gradients that leave at once stop the computation, so that comes last.
    """
    best = _fit_arena(decisions, profile, capacity_bytes - _peak(decisions, profile))
    tightest = tighten_framework(decisions, profile, 0)
    low, high = _peak(tightest, profile), _peak(decisions, profile)
    if best.over <= 0 or low == high:
        return best
    smaller = _fit_arena(tightest, profile, capacity_bytes - low)
    if smaller.over > 0:
        return min(best, smaller, key=lambda item: item.over)
    best = smaller
    # What the framework gives up the arena gains. Look for the least that it has to give up.
    for _ in range(_BISECTIONS):
        middle = tighten_framework(decisions, profile, (low + high) // 2)
        attempt = _fit_arena(middle, profile, capacity_bytes - _peak(middle, profile))
        if attempt.over <= 0:
            best, low = attempt, (low + high) // 2
        else:
            high = (low + high) // 2
    return _restored(best, decisions, profile, capacity_bytes)


def _restored(fitted: Fitted, wanted: Decisions, profile: Profile, capacity_bytes: int) -> Fitted:
    """Return ``fitted`` with activations and gradients as ``wanted``, as far as its arena leaves memory for that."""
    restored = tighten_framework(wanted, profile, capacity_bytes - fitted.placement.extent)
    tensors = tuple(
        replace(packed, grad_release_after=decision.grad_release_after)
        for packed, decision in zip(fitted.decisions.tensors, restored.tensors, strict=True)
    )
    return replace(fitted, decisions=replace(fitted.decisions, tensors=tensors, blocks=restored.blocks))


def _peak(decisions: Decisions, profile: Profile) -> int:
    """Return the framework's peak in bytes."""
    return int(framework_bytes(decisions.usage, profile).max())


# -- the arena: intervals of weights and states ----------------------------------------------------------------------


def _fit_arena(decisions: Decisions, profile: Profile, arena_bytes: int) -> Fitted:
    """Return ``decisions`` with their arena; intervals are shortened only if they waste too much as they are."""
    if arena_bytes <= 0:
        return _first_fit(decisions, profile, arena_bytes)
    attempts: list[Fitted] = []
    for attempt in _attempts(decisions, profile, arena_bytes):
        if attempt.over <= 0:
            # It may have been packed into less than there is.
            attempt = replace(attempt, over=attempt.placement.extent - arena_bytes)
        attempts.append(attempt)
        if attempt.over <= 0 and attempt.placement.waste <= GOAL:
            break
    # What fits, with the longest intervals unless they waste too much; else what comes nearest to fitting.
    return min(attempts, key=lambda item: (max(item.over, 0), item.placement.waste))


def _attempts(decisions: Decisions, profile: Profile, arena_bytes: int) -> Iterator[Fitted]:
    """Yield ways to place ``decisions``, those that change them least first, until there is no hope of a better one."""
    first = _first_fit(decisions, profile, arena_bytes)
    yield first
    live = first.placement.live_peak
    if live <= arena_bytes:
        # Less than there is, if that is enough: what is not wasted is left for activations and gradients.
        enough = min(arena_bytes, int(live * (1 + GOAL)))
        yield _packed(decisions, profile, enough, shorten=False)
        yield _packed(decisions, profile, enough, shorten=True)
        if first.over <= 0:
            return
    decisions = tighten_arena(decisions, profile, arena_bytes)
    first = _first_fit(decisions, profile, arena_bytes)
    live = first.placement.live_peak
    if live > arena_bytes:  # no interval can be shortened any more
        yield replace(first, over=live - arena_bytes)
        return
    yield first
    yield _packed(decisions, profile, arena_bytes, shorten=True)


def _first_fit(decisions: Decisions, profile: Profile, arena_bytes: int) -> Fitted:
    placement = arrange(decisions, profile)
    return Fitted(decisions=decisions, placement=placement, over=placement.extent - arena_bytes)


def _packed(decisions: Decisions, profile: Profile, arena_bytes: int, *, shorten: bool) -> Fitted:
    """Return the longest groups that fit; if none do, the way that comes nearest to that."""
    best: Fitted | None = None
    counts = {cut: len(runs(device_copies(decisions, profile), decisions, profile, cut=cut)) for cut in CUTS}
    different = list({count: cut for cut, count in counts.items()}.values())
    for cut in different:
        rounds = _ROUNDS if cut == different[-1] else _ROUNDS // _FEWER
        attempt = _pack(decisions, profile, arena_bytes, cut, shorten=shorten, rounds=rounds)
        if best is None or attempt.over < best.over:
            best = attempt
        if best.over <= 0:
            break
    assert best is not None
    return best


def _pack(
    decisions: Decisions, profile: Profile, arena_bytes: int, cut: int | None, *, shorten: bool, rounds: int
) -> Fitted:
    """Place what is large by packing, the rest below it by first fit."""
    copies = device_copies(decisions, profile)
    groups = runs(copies, decisions, profile, cut=cut)
    steps = len(timeline(profile))
    large = [group for group in groups if group.interval is not None and group.room >= _SMALL * arena_bytes]
    small = [group for group in groups if group.interval is None or group.room < _SMALL * arena_bytes]
    below = place([group.lifetime(steps) for group in small], steps)
    for group, offset in zip(small, below.offsets, strict=True):
        group.put(offset)
    intervals = [FlexibleInterval(group, decisions, profile) for group in large]
    lifetimes = [interval.lifetimes() if shorten else [(interval.start, interval.end)] for interval in intervals]
    buffers = [
        Flexible(group.room, tuple(interval.steps_of(life) for life in allowed))
        for group, interval, allowed in zip(large, intervals, lifetimes, strict=True)
    ]
    packed = pack(buffers, steps, arena_bytes - below.extent, rounds=min(rounds, _ROUNDS_PER_BUFFER * len(large)))
    for group, interval, offset, allowed, chosen in zip(
        large, intervals, packed.offsets, lifetimes, packed.lifetimes, strict=True
    ):
        group.put(below.extent + offset)
        interval.start, interval.end = allowed[chosen]
    unchanged = [FlexibleInterval(group, decisions, profile) for group in small if group.interval]
    decisions = _with_intervals(decisions, copies, [*intervals, *unchanged])
    offsets = tuple(copy.offset for copy in copies)
    extent = max((copy.offset + copy.room for copy in copies), default=0)
    live = live_bytes([copy.lifetime(steps) for copy in device_copies(decisions, profile)], steps)
    over = packed.missing or extent - arena_bytes
    return Fitted(decisions=decisions, placement=Placement(offsets, extent, int(live.max(initial=0))), over=over)


def tighten_arena(decisions: Decisions, profile: Profile, limit: int) -> Decisions:
    """Return ``decisions`` with the peak of live arena bytes at ``limit``, or as near above it as possible."""
    steps = len(timeline(profile))
    copies = device_copies(decisions, profile)
    live = live_bytes([copy.lifetime(steps) for copy in copies], steps)
    groups = runs(copies, decisions, profile, cut=CUTS[-1])
    intervals = [FlexibleInterval(group, decisions, profile) for group in groups if group.interval is not None]
    while live.max() > limit:
        step = int(live.argmax())
        over = int(live[step]) - limit
        moves = [
            (lost_steps, interval.group.room, index, late)
            for index, interval in enumerate(intervals)
            for lost_steps, late in interval.moves(step)
        ]
        if not moves:
            break
        # The shortest delay first; of those the smallest buffer that is enough, else the largest.
        _, freed, index, late = min(moves, key=lambda m: (m[0], m[1] < over, m[1] if m[1] >= over else -m[1]))
        live[intervals[index].shorten(step, late)] -= freed
    return _with_intervals(decisions, copies, intervals)


class FlexibleInterval:
    """The interval of a group of copies, which may be shortened at both ends. Times are steps since its first one."""

    def __init__(self, group: CopyGroup, decisions: Decisions, profile: Profile) -> None:
        assert group.interval is not None
        self.group, self.steps, copy = group, len(timeline(profile)), group.copies[0]
        self.origin = group.interval.start
        self.start, self.end = 0, self._since(group.interval.end)
        tensor, decision = profile.tensors[copy.tensor], decisions.tensors[copy.tensor]
        weight = copy.payload == "weight"
        needed = copy_uses(copy.tensor, decisions, profile) if weight else backward_steps(tensor.blocks, profile)[-1:]
        copied_after = decision.write_back if weight else decision.state_offload_after
        inside = [since for step in needed if (since := self._since(step)) <= self.end]
        # One step before the first use, so that the prefetch still has a step to run beside.
        self.latest_start = max(min(inside) - 1, 0)
        self.earliest_end = max(inside)
        if copied_after is not None and self._since(copied_after) <= self.end:
            self.earliest_end = max(self.earliest_end, self._since(copied_after))

    def moves(self, step: int) -> Iterator[tuple[int, bool]]:
        """Yield (steps lost, whether the start moves) for the ways not to be there in ``step``."""
        since = self._since(step)
        if self.start <= since < self.latest_start:
            yield since - self.start + 1, True
        if self.earliest_end < since <= self.end:
            yield self.end - since + 1, False

    def shorten(self, step: int, late: bool) -> list[int]:
        """Begin after ``step`` or end before it; return the steps that are freed."""
        since = self._since(step)
        freed = range(self.start, since + 1) if late else range(since, self.end + 1)
        if late:
            self.start = since + 1
        else:
            self.end = since - 1
        return self._steps(freed)

    def lifetimes(self) -> list[tuple[int, int]]:
        """Return every (start, end) it may have, the longest first."""
        allowed = [
            (start, end)
            for start in range(self.start, max(self.start, self.latest_start) + 1)
            for end in range(self.end, self.earliest_end - 1, -1)
        ]
        return sorted(allowed, key=lambda life: life[0] - life[1])

    def steps_of(self, lifetime: tuple[int, int]) -> tuple[int, ...]:
        """Return the steps of one of :meth:`lifetimes`."""
        return tuple(self._steps(range(lifetime[0], lifetime[1] + 1)))

    @property
    def interval(self) -> Interval:
        """The interval as it is now."""
        return Interval(start=(self.origin + self.start) % self.steps, end=(self.origin + self.end) % self.steps)

    def _since(self, step: int) -> int:
        return (step - self.origin) % self.steps

    def _steps(self, since: range) -> list[int]:
        return [(self.origin + count) % self.steps for count in since]


def _with_intervals(
    decisions: Decisions, copies: Sequence[DeviceCopy], intervals: Sequence[FlexibleInterval]
) -> Decisions:
    """Return ``decisions`` with these intervals, which are those of all ``copies`` that move."""
    now = {id(copy): item.interval for item in intervals for copy in item.group.copies}
    weights: dict[int, list[Interval]] = {}
    tensors = list(decisions.tensors)
    for copy in copies:
        if copy.interval is None:
            continue
        if copy.payload == "weight":
            weights.setdefault(copy.tensor, []).append(now[id(copy)])
        else:
            tensors[copy.tensor] = replace(tensors[copy.tensor], state_interval=now[id(copy)])
    for tensor, own in weights.items():
        tensors[tensor] = replace(tensors[tensor], intervals=tuple(own))
    return replace(decisions, tensors=tuple(tensors))


# -- the framework: activations and gradients ------------------------------------------------------------------------


def tighten_framework(decisions: Decisions, profile: Profile, limit: int) -> Decisions:
    """Return ``decisions`` with the framework's peak at ``limit`` bytes, or as near above it as possible."""
    used = framework_bytes(decisions.usage, profile)
    if used.max() <= limit:
        return decisions
    spans = list(_removable(decisions, profile))
    if not spans:
        return decisions
    columns = zip(*(span.steps_bytes for span in spans), strict=True)
    first, last, sizes = (np.array(column, dtype=np.int64) for column in columns)
    arriving = np.array([span.kind == "in" for span in spans])
    while used.max() > limit:
        step = int(used.argmax())
        here = np.flatnonzero((first <= step) & (step <= last))
        if not len(here):
            break
        # The smallest that is enough, else the largest.
        enough = here[sizes[here] >= int(used[step]) - limit]
        chosen = int(enough[sizes[enough].argmin()] if len(enough) else here[sizes[here].argmax()])
        if arriving[chosen]:
            used[first[chosen] : step + 1] -= sizes[chosen]
            first[chosen] = step + 1
        else:
            used[step : last[chosen] + 1] -= sizes[chosen]
            last[chosen] = step - 1
    tensors, blocks = list(decisions.tensors), list(decisions.blocks)
    for span, begin, end in zip(spans, first.tolist(), last.tolist(), strict=True):
        if span.kind == "grad":
            tensors[span.index] = replace(tensors[span.index], grad_release_after=end)
        elif span.kind == "out":
            blocks[span.index] = replace(blocks[span.index], release_after=end)
        else:
            blocks[span.index] = replace(blocks[span.index], prefetch_at=begin)
    return replace(decisions, tensors=tuple(tensors), blocks=tuple(blocks))


@dataclass(frozen=True, slots=True)
class _Removable:
    """Steps for which a tensor's gradient or a block's activations are held only so that a copy may take its time."""

    kind: Literal["grad", "out", "in"]
    """``out``: activations on their way to the host; ``in``: on their way back."""
    index: int
    """Of the tensor or block."""
    steps_bytes: tuple[int, int, int]
    """First and last step, and the bytes that are held."""


def _removable(decisions: Decisions, profile: Profile) -> Iterator[_Removable]:
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        if decision.grad_release_after is not None:
            complete = backward_steps(tensor.blocks, profile)[-1]
            yield _Removable("grad", index, (complete + 1, decision.grad_release_after, tensor.bytes))
    for index, nbytes, release_after, prefetch_at in _offloaded(decisions, profile):
        yield _Removable("out", index, (index + 1, release_after, nbytes))
        yield _Removable("in", index, (prefetch_at, decisions.activations_needed(index, profile) - 1, nbytes))


def _offloaded(decisions: Decisions, profile: Profile) -> Iterator[tuple[int, int, int, int]]:
    """Yield (block, bytes, release_after, prefetch_at) for the activations that travel."""
    for index, (block, decision) in enumerate(zip(profile.blocks, decisions.blocks, strict=True)):
        if decision.release_after is not None and decision.prefetch_at is not None:
            nbytes = block.option(decision.option).offload_bytes
            yield index, nbytes, decision.release_after, decision.prefetch_at


def loosen(decisions: Decisions, profile: Profile, limit: int, *, earlier: bool) -> Decisions:
    """Return ``decisions`` with more time for copies, as far as at most ``limit`` bytes of framework memory allow.

    A computation waits until the memory that it takes over has been given back, and for activations that are still on
    their way. Holding both for longer costs nothing but memory, and only in steps that have some left.

    ``earlier``: not only departures may be put off, but arrivals brought forward as well. That delays other copies to
    the device, so it does not always pay.
    """
    free = limit - framework_bytes(decisions.usage, profile)
    offloaded = list(_offloaded(decisions, profile))
    departures = [_Hold(nbytes, out, back - 1, block=index) for index, nbytes, out, back in offloaded]
    departures += _gradients(decisions, profile)
    arrivals = [_Hold(nbytes, back, out + 1, block=index) for index, nbytes, out, back in offloaded]
    for turn in range(_LATER):
        # Everybody gets one step before anybody gets two.
        for departure in departures:
            departure.extend(+1, free)
        for arrival in arrivals if earlier and turn < _EARLIER else ():
            arrival.extend(-1, free)
    blocks, tensors = list(decisions.blocks), list(decisions.tensors)
    for departure in departures:
        if departure.block is not None:
            blocks[departure.block] = replace(blocks[departure.block], release_after=departure.step)
        for tensor in departure.tensors:
            tensors[tensor] = replace(tensors[tensor], grad_release_after=departure.step)
    for arrival in arrivals:
        assert arrival.block is not None
        # Both may have moved towards each other; the departure goes first.
        prefetch_at = max(arrival.step, (blocks[arrival.block].release_after or 0) + 1)
        blocks[arrival.block] = replace(blocks[arrival.block], prefetch_at=prefetch_at)
    return replace(decisions, blocks=tuple(blocks), tensors=tuple(tensors))


@dataclass(slots=True)
class _Hold:
    """Bytes that are held to the end of step ``step``, or from its beginning; at the furthest to or from ``limit``."""

    bytes: int
    step: int
    limit: int
    block: int | None = None
    tensors: tuple[int, ...] = ()

    def extend(self, by: int, free: Bytes) -> None:
        """Hold for one step more in direction ``by`` if there are that many bytes."""
        step = self.step + by
        if step * by <= self.limit * by and free[step] >= self.bytes:
            free[step] -= self.bytes
            self.step = step


def _gradients(decisions: Decisions, profile: Profile) -> Iterator[_Hold]:
    """Gradients that leave together now leave together afterwards: each group is one copy."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        if decision.grad_release_after is not None:
            groups[backward_steps(tensor.blocks, profile)[-1], decision.grad_release_after].append(index)
    last = len(timeline(profile)) - 1
    for (_, release_after), tensors in groups.items():
        yield _Hold(sum(profile.tensors[t].bytes for t in tensors), release_after, last, tensors=tuple(tensors))
