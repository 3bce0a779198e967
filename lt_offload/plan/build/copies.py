"""The device copies of one iteration: which weight or state is in the arena, when and where. Knows no ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lt_offload.plan.iteration.arena import Lifetime, aligned
from lt_offload.plan.iteration.decisions import Choices, Stay
from lt_offload.schema.profile import Profile

_STATE_PADDING = 32
"""Each state tensor of a parameter begins at a multiple of 8 bytes; room for four of them to be rounded up."""


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """One stay of a weight, or of a tensor's states, in the arena."""

    payload: Literal["weight", "state"]
    tensor: int
    bytes: int
    """What is copied."""
    room: int
    """What it takes of the arena."""
    stay: Stay | None
    """None: always."""
    offset: int = 0
    fetch: int | None = None
    """The op that brings it."""
    releases: list[int] = field(default_factory=list)
    """The ops after which its range may be written again."""

    def lifetime(self, steps: int) -> Lifetime:
        """Return when it takes room."""
        return lifetime(self.stay, self.room, steps)

    def covers(self, step: int) -> bool:
        """Return whether it is on the device in ``step``."""
        if self.stay is None:
            return True
        start, end = self.stay.start, self.stay.end
        return start <= step <= end if start <= end else step >= start or step <= end

    @property
    def at_start(self) -> bool:
        """Whether it is on the device before step 0 has issued anything."""
        return self.stay is None or self.stay.start > self.stay.end


def lifetime(stay: Stay | None, room: int, steps: int) -> Lifetime:
    """Return when something that is on the device during ``stay`` takes ``room`` bytes."""
    return Lifetime(room, stay.start, stay.end) if stay else Lifetime(room, 0, steps - 1)


def state_room(nbytes: int) -> int:
    """Return the arena bytes that ``nbytes`` of optimizer states take."""
    return aligned(nbytes + _STATE_PADDING) if nbytes else 0


def device_copies(choices: Choices, profile: Profile) -> list[DeviceCopy]:
    """Return every stay of every weight and state, without offsets."""
    copies = []
    for index, (tensor, choice) in enumerate(zip(profile.tensors, choices.tensors, strict=True)):
        room = aligned(tensor.bytes)
        always = () if choice.direct else (None,)
        copies += [DeviceCopy("weight", index, tensor.bytes, room, stay) for stay in choice.stays or always]
        if choice.place in ("device", "paged") and tensor.state_bytes:
            room = state_room(tensor.state_bytes)
            copies.append(DeviceCopy("state", index, tensor.state_bytes, room, choice.state_stay))
    return copies
