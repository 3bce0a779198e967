"""The device copies of one iteration: stays of weights and states in the arena, with their times and places.

Copies of tensors that will be in the same ops are placed side by side in the arena, in ascending order, up to 16 MiB:
longer rows are harder to place and gain nothing, since such a copy runs at the full speed of any link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lt_offload.plan.iteration.decisions import Decisions, Interval
from lt_offload.plan.iteration.memory import aligned, backward_steps, state_room
from lt_offload.schema.profile import Profile

SMALL = 16 << 20
"""Tensors below this travel together where that costs nothing: such a copy runs at the full speed of any link."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceCopy:
    """One stay of a weight, or of a tensor's states, in the arena; when and where is 0 until it has been placed."""

    payload: Literal["weight", "state"]
    tensor: int
    bytes: int
    """Bytes that are copied."""
    room: int
    """Bytes of the arena that it takes."""
    stay: Interval | None
    """From its first use on; None: always."""
    arrival: int = 0
    """The step in which it is queued, before that step's computation; its stay's first use or earlier."""
    offset: int = 0
    turn: int = 0
    """Order among the copies of a step; copies of different turns are different ops."""

    def covers(self, step: int) -> bool:
        """Return whether it is on the device in ``step``."""
        if self.stay is None:
            return True
        start, end = self.arrival, self.stay.end
        # A stay may begin late in an iteration and end early in the next one.
        return start <= step <= end if start <= end else step >= start or step <= end

    @property
    def at_start(self) -> bool:
        """True: on the device before step 0 has issued anything."""
        # It arrives in a later step than it ends in: its stay runs over the end of the iteration.
        return self.stay is None or self.arrival > self.stay.end


def device_copies(decisions: Decisions, profile: Profile) -> list[DeviceCopy]:
    """Return every stay of every weight and state."""
    copies = []
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        # No stays mean always there, but for a weight that is read in host memory wherever it is used.
        always = () if decision.zero_copy else (None,)
        copies += [
            DeviceCopy(payload="weight", tensor=index, bytes=tensor.bytes, room=aligned(tensor.bytes), stay=stay)
            for stay in decision.stays or always
        ]
        if decision.place in ("device", "paged") and tensor.state_bytes:
            update = backward_steps(tensor.blocks, profile)[-1]
            # States are needed by the update alone, and that comes when the last block that uses the tensor has had its
            # backward.
            stay = Interval(start=update, end=update) if decision.place == "paged" else None
            room = state_room(tensor.state_bytes)
            copies.append(DeviceCopy(payload="state", tensor=index, bytes=tensor.state_bytes, room=room, stay=stay))
    return copies


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies side by side, in ascending order of their tensors: all weights, or all states, with the same stays."""

    copies: tuple[DeviceCopy, ...]

    @property
    def room(self) -> int:
        """Bytes of the arena that it takes."""
        return sum(copy.room for copy in self.copies)

    @property
    def stay(self) -> Interval | None:
        """None: always."""
        return self.copies[0].stay


def runs(copies: Sequence[DeviceCopy], decisions: Decisions, profile: Profile) -> list[CopyGroup]:
    """Return ``copies``, which are all there are, as runs that end as soon as they are not :data:`SMALL`."""
    alike: dict[Hashable, list[DeviceCopy]] = defaultdict(list)
    for copy in copies:
        alike[_travels(copy, decisions, profile)].append(copy)
    # What never leaves is copied once before training: its size delays nothing, so it is not cut.
    return [CopyGroup(part) for some in alike.values() for part in (_cut(some) if some[0].stay else [tuple(some)])]


def _travels(copy: DeviceCopy, decisions: Decisions, profile: Profile) -> Hashable:
    """Return a key that is equal for copies in the same ops, now and in their tensors' other stays."""
    if copy.stay is None:
        return copy.payload
    blocks, decision = profile.tensors[copy.tensor].blocks, decisions.tensors[copy.tensor]
    # One stay, for the update, whose step follows from the blocks: nothing else can differ.
    if copy.payload == "state":
        return copy.payload, blocks
    waits = decision.place == "host"  # those that wait for an update on the host are fetched apart
    # Neighbours are one group only if they are so in every op of the iteration (groups.py), so all of this has to
    # agree.
    apart = decision.apart, decision.zero_copy, decision.write_back
    return copy.payload, copy.stay, blocks, waits, decision.stays, apart


def _cut(copies: Sequence[DeviceCopy]) -> Iterator[tuple[DeviceCopy, ...]]:
    """Yield ``copies`` in parts of at least :data:`SMALL` bytes, of which none could end earlier."""
    part: list[DeviceCopy] = []
    size, rest = 0, sum(copy.room for copy in copies)
    for copy in copies:
        part.append(copy)
        size, rest = size + copy.room, rest - copy.room
        # No cut if the rest would be a small copy of its own.
        if size >= SMALL <= rest:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


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
