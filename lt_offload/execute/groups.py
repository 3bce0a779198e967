"""Tensors that always travel together, and where they stand side by side in host memory. Knows the plan's ops.

A *parcel* is a range of the arena and of host memory with the weights, or the states, of one or more tensors: all that
the plan fetches, drops and updates in the same ops, and has put side by side in the arena wherever it wants them. So
there is one buffer, one set of events and one copy for all of them.
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
Key = tuple[str, int]
"""Payload and index of a tensor, as in plans."""


class Parcel:
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

    def __init__(self, members: Sequence[Weight] | Sequence[States], device: Device) -> None:
        self.members: tuple[Member, ...] = tuple(members)
        self.device = device
        self.label = members[0].label + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        self.host: Tensor
        """The bytes of all host copies."""
        self.span: Tensor
        """The host memory of all parcels that are fetched together; ``host`` is part of it."""
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
            member.parcel, member.start = self, start
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
    """The parcels of a model.

    Args:
        device: whose host memory holds them.
        weights: all of the model; their host copies move here.
        blocks: the weights of each block.
        plan: without one, what a block uses first is one parcel.
        staying: weights whose host copies stay where they are, as far as the device allows it; each is a parcel.
    """

    def __init__(
        self,
        device: Device,
        weights: Sequence[Weight],
        blocks: Sequence[Sequence[Weight]],
        plan: Plan | None,
        staying: Collection[int] = (),
    ) -> None:
        self._staying = staying
        self._device = device
        self._owner = {weight.index: at for at in reversed(range(len(blocks))) for weight in blocks[at]}
        self._offsets, self._uses = _offsets(plan), _uses(plan)
        self.of: dict[Key, Parcel] = {}
        """The parcel of every weight, and of all states that the plan brings to the device."""
        self.all: list[Parcel] = []
        if plan is not None:
            for weight, room in zip(weights, plan.state_bytes, strict=True):
                weight.states.room = room
        states = [w.states for w in weights if ("state", w.index) in self._offsets]
        for members in (weights, states):
            self._make(members)

    def _make(self, members: Sequence[Weight] | Sequence[States]) -> None:
        """Make parcels of what may share one, and host memory for those that are fetched together."""
        together: defaultdict[tuple[object, ...], list[Member]] = defaultdict(list)
        for member in members:
            first = next(iter(self._offsets.get(_key(member), {})), None)
            alone = isinstance(member, Weight) and member.index in self._staying
            together[first, self._owner.get(member.index), member.index if alone else None].append(member)
        for group in together.values():
            group.sort(key=self._place)
            parcels = [Parcel(part, self._device) for part in self._parts(group)]  # type: ignore[arg-type]
            self.all += parcels
            for parcel in parcels:
                self.of.update((_key(member), parcel) for member in parcel.members)
            _house(parcels, self._device)

    def _place(self, member: Member) -> tuple[int, int]:
        return next(iter(self._offsets.get(_key(member), {}).values()), 0), member.index

    def _parts(self, group: list[Member]) -> Iterator[list[Member]]:
        part: list[Member] = []
        for member in group:
            if part and not self._joined(part[-1], member):
                yield part
                part = []
            part.append(member)
        yield part

    def _joined(self, one: Member, other: Member) -> bool:
        """Return whether ``other`` can follow ``one`` in a parcel."""
        if self._uses.get(_key(one)) != self._uses.get(_key(other)):
            return False
        here, there = (self._offsets.get(_key(m), {}) for m in (one, other))
        size = round_up(one.room, ALIGNMENT)
        return here.keys() == there.keys() and all(there[op] == at + size for op, at in here.items())


def _house(parcels: Sequence[Parcel], device: Device) -> None:
    """Let the host copies of ``parcels`` stand side by side, in this order."""
    members = [member for parcel in parcels for member in parcel.members]
    first = members[0]
    if len(members) == 1 and isinstance(first, Weight) and first.host.is_contiguous():
        first.rehost(device.host_adopt(first.host))
        parcels[0].host = parcels[0].span = first.host.view(-1).view(torch.uint8)
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
    for parcel in parcels:
        parcel.host, parcel.span = span[at : at + parcel.nbytes], span
        at += parcel.room


def _key(member: Member) -> Key:
    return ("weight" if isinstance(member, Weight) else "state", member.index)


def _offsets(plan: Plan | None) -> dict[Key, dict[int, int]]:
    """Return the arena offsets of each tensor by the op that brings it, -1 for the start of an iteration."""
    found: defaultdict[Key, dict[int, int]] = defaultdict(dict)
    if plan is not None:
        for op in plan.ops:
            if op.kind == "prefetch" and op.payload in ("weight", "state"):
                for tensor, offset in zip(op.tensors, op.offsets, strict=True):
                    found[op.payload, tensor][op.id] = offset
        for resident in plan.initial:
            found[resident.payload, resident.tensor][-1] = resident.offset
    return dict(found)


def _uses(plan: Plan | None) -> dict[Key, list[int]]:
    """Return the ops in which each tensor or its gradient takes part: what takes part in the same ones is alike."""
    found: defaultdict[Key, list[int]] = defaultdict(list)
    if plan is not None:
        for op in plan.ops:
            payloads = (op.payload,) if op.payload in ("weight", "state") else ("weight", "state")
            for tensor in (*op.tensors, *op.zero_copy):
                for payload in payloads:
                    found[payload, tensor].append(op.id)
    return dict(found)
