"""Which device copies lie side by side in the arena, so that one transfer moves them. Knows choices, not offsets.

Tensors that travel in the same ops through the whole iteration have their host copies side by side as well, in
ascending order. A run of them is one transfer each time. Long runs are harder to place than short ones and gain
nothing: a transfer of 16 MiB runs at the full speed of any link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from lt_offload.plan.build.copies import DeviceCopy, device_copies, lifetime
from lt_offload.plan.build.placement import Lifetime, Placement, place
from lt_offload.plan.iteration.decisions import Decisions, Interval
from lt_offload.schema.profile import Profile

MIB = 1 << 20
CUTS: tuple[int | None, ...] = (None, 16 * MIB, 1 * MIB)
"""Bytes from which on a run may end, the longest runs first; None: what travels together is never parted."""
GOAL = 0.03
"""Bytes of the arena beyond the peak of live bytes, as part of it, that are not worth shorter runs."""


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies side by side, in ascending order of their tensors: all weights, or all states, with the same stays."""

    copies: tuple[DeviceCopy, ...]

    @property
    def room(self) -> int:
        """What it takes of the arena."""
        return sum(copy.room for copy in self.copies)

    @property
    def interval(self) -> Interval | None:
        """None: always."""
        return self.copies[0].interval

    def lifetime(self, steps: int) -> Lifetime:
        """Return when it takes room."""
        return lifetime(self.interval, self.room, steps)

    def put(self, offset: int) -> None:
        """Give every copy its offset."""
        for copy in self.copies:
            copy.offset = offset
            offset += copy.room


def runs(copies: Sequence[DeviceCopy], decisions: Decisions, profile: Profile, *, cut: int | None) -> list[CopyGroup]:
    """Return ``copies``, which are all there are, as runs that end as soon as they may: see :data:`CUTS`."""
    alike: dict[Hashable, list[DeviceCopy]] = defaultdict(list)
    for copy in copies:
        alike[_travels(copy, decisions, profile)].append(copy)
    return [
        CopyGroup(part)
        for found in alike.values()
        for part in (_cut(found, cut) if found[0].interval else [tuple(found)])
    ]


def arrange(decisions: Decisions, profile: Profile) -> Placement:
    """Return the arena that ``decisions`` need, its offsets in the order of ``device_copies``.

    What travels together lies side by side, as far as that wastes no memory.
    """
    copies, steps = device_copies(decisions, profile), 2 * len(profile.blocks)
    best: Placement | None = None
    for cut in CUTS:
        parts = runs(copies, decisions, profile, cut=cut)
        found = place([part.lifetime(steps) for part in parts], steps)
        if best is None or found.extent < best.extent:
            for part, offset in zip(parts, found.offsets, strict=True):
                part.put(offset)
            best = Placement(tuple(copy.offset for copy in copies), found.extent, found.live_peak)
        if best.waste <= GOAL:
            break
    assert best is not None
    return best


def _travels(copy: DeviceCopy, decisions: Decisions, profile: Profile) -> Hashable:
    """Return what is the same for copies that are in the same ops, now and in their tensors' other stays."""
    if copy.interval is None:
        return copy.payload
    blocks, decision = profile.tensors[copy.tensor].blocks, decisions.tensors[copy.tensor]
    if copy.payload == "state":
        return copy.payload, blocks, decision.state_interval, decision.state_offload_after
    waits = decision.place == "host"  # those that wait for an update on the host are fetched apart
    return copy.payload, copy.interval, blocks, waits, decision.intervals, decision.zero_copy, decision.write_back


def _cut(copies: Sequence[DeviceCopy], cut: int | None) -> Iterator[tuple[DeviceCopy, ...]]:
    """Yield ``copies`` in parts of at least ``cut`` bytes, of which none could end earlier."""
    part: list[DeviceCopy] = []
    size, rest = 0, sum(copy.room for copy in copies)
    for copy in copies:
        part.append(copy)
        size, rest = size + copy.room, rest - copy.room
        if cut is not None and size >= cut <= rest:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)
