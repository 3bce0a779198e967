"""The device copies of one iteration: which weight or state is in the arena, when and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lt_offload.plan.assembly.placement import Lifetime
from lt_offload.plan.iteration.decisions import Decisions, Interval
from lt_offload.plan.iteration.memory import aligned, state_room
from lt_offload.schema.profile import Profile

SMALL = 16 << 20
"""Tensors below this travel together where that costs nothing: such a copy runs at the full speed of any link."""


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """One stay of a weight, or of a tensor's states, in the arena."""

    payload: Literal["weight", "state"]
    tensor: int
    bytes: int
    """What is copied."""
    room: int
    """What it takes of the arena."""
    interval: Interval | None
    """None: always."""
    offset: int = 0
    turn: int = 0
    """Orders the copies of a step; those of different turns are different ops."""
    fetch: int | None = None
    """The op that brings it."""
    releases: list[int] = field(default_factory=list)
    """The ops after which its range may be written again."""

    def lifetime(self, steps: int) -> Lifetime:
        """Return when it takes room."""
        return lifetime(self.interval, self.room, steps)

    def covers(self, step: int) -> bool:
        """Return whether it is on the device in ``step``."""
        if self.interval is None:
            return True
        start, end = self.interval.start, self.interval.end
        return start <= step <= end if start <= end else step >= start or step <= end

    @property
    def at_start(self) -> bool:
        """Whether it is on the device before step 0 has issued anything."""
        return self.interval is None or self.interval.start > self.interval.end


def lifetime(interval: Interval | None, room: int, steps: int) -> Lifetime:
    """Return when something that is on the device during ``interval`` takes ``room`` bytes."""
    return Lifetime(room, interval.start, interval.end) if interval else Lifetime(room, 0, steps - 1)


def device_copies(decisions: Decisions, profile: Profile) -> list[DeviceCopy]:
    """Return every stay of every weight and state, without offsets."""
    copies = []
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        room = aligned(tensor.bytes)
        always = () if decision.zero_copy else (None,)
        copies += [
            DeviceCopy("weight", index, tensor.bytes, room, interval) for interval in decision.intervals or always
        ]
        if decision.place in ("device", "paged") and tensor.state_bytes:
            room = state_room(tensor.state_bytes)
            copies.append(DeviceCopy("state", index, tensor.state_bytes, room, decision.state_interval))
    return copies


def in_parts(tensors: Sequence[int], profile: Profile) -> list[list[int]]:
    """Return ``tensors`` in the parts in which they leave: large ones alone, neighbours below that together."""
    parts: list[list[int]] = []
    size = 0
    for tensor in tensors:
        nbytes = profile.tensors[tensor].bytes
        if not parts or size + nbytes > SMALL:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += nbytes
    return parts
