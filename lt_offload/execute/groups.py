"""A plan's tensor groups as they are on this machine: where they stand in host memory, and what is on its way.

A live group has one buffer, one set of events and one copy for all its tensors. Where a user holds the memory of a
weight (a state dict that was kept), that weight is a live group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lt_offload.execute.device.base import Buffer, Cell, Device, Event
from lt_offload.execute.optimizer import Updates
from lt_offload.execute.tensors import States, Weight, distinct
from lt_offload.schema.plan import ALIGNMENT, Plan
from lt_offload.units import round_up

Member = Weight | States


class LiveGroup:
    """A host copy, an optional device copy, and the events that say when each is complete."""

    __slots__ = (
        "buffer",
        "current",
        "device",
        "dirty",
        "host",
        "host_cell",
        "label",
        "leaving",
        "members",
        "nbytes",
        "ready",
        "room",
        "span",
    )

    def __init__(self, members: Sequence[Member], device: Device) -> None:
        self.members: tuple[Member, ...] = tuple(members)
        self.device = device
        self.label = members[0].label + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        self.host: Tensor
        """The bytes of all host copies."""
        self.span: Tensor
        """The host memory of all groups that are fetched together; ``host`` is part of it."""
        self.host_cell = Cell(f"host {self.label}")
        self.buffer: Buffer | None = None
        self.ready: Event | None = None
        """The device copy is complete; None: the compute lane is ordered after that, or there is none."""
        self.leaving: Event | None = None
        """The last copy from the device copy to the host."""
        self.current: Event | None = None
        """The host copy is complete; None: it is."""
        self.dirty = False
        """The device copy is newer than the host copy."""
        start = 0
        for member in self.members:
            member.group, member.start = self, start
            start += round_up(member.room, ALIGNMENT)
        self.room = start
        """Bytes that it takes of the arena."""
        self.nbytes = self.members[-1].start + self.members[-1].room
        """Bytes that are copied."""

    @property
    def filled(self) -> bool:
        """Whether there is anything to copy; states appear with the first update."""
        return any(isinstance(member, Weight) or member.known for member in self.members)

    def attach(self, buffer: Buffer) -> None:
        """Use ``buffer`` for the device copy."""
        assert self.buffer is None, f"{self.label} is on the device already"
        self.buffer = buffer
        for member in self.members:
            member.attach(buffer)

    def detach(self) -> None:
        """Forget the device copy and give its range back; its next writer waits for the copies in and out."""
        assert self.buffer is not None
        self.device.free(self.buffer, distinct((self.ready, self.leaving)))
        self.buffer = self.ready = self.leaving = None
        self.dirty = False
        for member in self.members:
            member.detach()

    def refresh(self, updates: Updates) -> None:
        """Adopt the states that the optimizer has now, if these are states."""
        for member in self.members:
            if isinstance(member, States):
                updates.generation += member.refresh(updates.state(member.weight))


class Layout:
    """The groups of a model: the tensor groups of a plan, as they are on this machine.

    Args:
        device: whose host memory holds them.
        weights: all of the model; their host copies move here.
        blocks: the weights of each block.
        plan: without one, what a block uses first is one group.
        staying: weights whose host copies stay where they are, as far as the device allows it. Each is a group of its
            own: the rest of its group stands elsewhere in host memory.
    """

    def __init__(
        self,
        device: Device,
        weights: Sequence[Weight],
        blocks: Sequence[Sequence[Weight]],
        plan: Plan | None,
        staying: Collection[int] = (),
    ) -> None:
        self._device, self._staying = device, staying
        self.parts: dict[int, tuple[tuple[LiveGroup, int], ...]] = {}
        """Of each group of the plan: its groups, and where in the group they begin."""
        self.all: list[LiveGroup] = []
        if plan is None:
            owner = {weight.index: index for index in reversed(range(len(blocks))) for weight in blocks[index]}
            owned: defaultdict[int | None, list[Weight]] = defaultdict(list)
            for weight in weights:
                owned[owner.get(weight.index)].append(weight)
            for members in owned.values():
                self._house([group for group, _ in self._split(members, [0] * len(members))])
            return
        spans: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number, planned in enumerate(plan.groups):
            if planned.payload != "grad":
                spans[planned.payload, planned.span].append(number)
        for numbers in spans.values():
            for number in numbers:
                planned = plan.groups[number]
                grouped: list[Member] = [weights[tensor] for tensor in planned.tensors]
                if planned.payload == "state":
                    grouped = [weights[tensor].states for tensor in planned.tensors]
                    for tensor, size in zip(planned.tensors, planned.sizes, strict=True):
                        weights[tensor].states.room = size
                self.parts[number] = tuple(self._split(grouped, planned.sizes))
            self._house([group for number in numbers for group, _ in self.parts[number]])

    def _split(self, members: Sequence[Member], sizes: Sequence[int]) -> Iterator[tuple[LiveGroup, int]]:
        """Yield the groups that ``members`` make up, and where each begins."""
        part: list[Member] = []
        begin = end = 0
        for member, size in zip(members, sizes, strict=True):
            if part and (self._alone(part[-1]) or self._alone(member)):
                yield LiveGroup(part, self._device), begin
                part, begin = [], end
            part.append(member)
            end += size
        yield LiveGroup(part, self._device), begin

    def _alone(self, member: Member) -> bool:
        return isinstance(member, Weight) and member.index in self._staying

    def _house(self, groups: Sequence[LiveGroup]) -> None:
        """Make host memory for groups of one span: side by side, but for those whose memory stays."""
        self.all += groups
        together = [group for group in groups if not self._alone(group.members[0])]
        if together:
            _house(together, self._device)
        for group in groups:
            if self._alone(group.members[0]):
                _house([group], self._device)


def _house(groups: Sequence[LiveGroup], device: Device) -> None:
    """Let the host copies of ``groups`` stand side by side, in this order."""
    members = [member for group in groups for member in group.members]
    first = members[0]
    if len(members) == 1 and isinstance(first, Weight) and first.host.is_contiguous():
        first.rehost(device.host_adopt(first.host))
        groups[0].host = groups[0].span = first.host.view(-1).view(torch.uint8)
        return
    parts = [
        (tuple(m.host.shape), m.host.dtype) if isinstance(m, Weight) else ((m.room,), torch.uint8) for m in members
    ]
    span, tensors = device.host_group(parts)
    for member, tensor in zip(members, tensors, strict=True):
        if isinstance(member, Weight):
            tensor.copy_(member.host)
            member.rehost(tensor)
        else:
            member.slot = tensor
    at = 0
    for group in groups:
        group.host, group.span = span[at : at + group.nbytes], span
        at += group.room
