"""A plan's tensor groups as they are on this machine: how they stand in host memory, span by span."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from lt_offload.compat.torch import buffers_of
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.common import Common
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.tensors import Member, States, Sum, Weight
from lt_offload.model.blocks import Structure
from lt_offload.schema.plan import TensorGroup


class Layout:
    """The groups of a model: the tensor groups of a plan, as they are on this machine.

    Without ``planned`` groups, what a block uses first is one. ``staying`` are weights whose host copies stay where
    they are, as far as the device allows it: each is a group of its own, and the rest of its group stands elsewhere in
    host memory.
    """

    def __init__(
        self,
        device: Device,
        weights: Sequence[Weight],
        blocks: Sequence[Sequence[Weight]],
        planned: Sequence[TensorGroup] | None,
        staying: Collection[int] = (),
        common: Common | None = None,
    ) -> None:
        self._device, self._staying, self._common = device, staying, common
        self.parts: dict[int, tuple[tuple[LiveGroup, int], ...]] = {}
        """By group of the plan: the groups that it consists of here, and where in it they begin."""
        self.all: list[LiveGroup] = []
        if planned is None:
            # Backwards, so that of the blocks that share a weight the first one has it.
            owner = {weight.index: index for index in reversed(range(len(blocks))) for weight in blocks[index]}
            owned: defaultdict[int | None, list[Weight]] = defaultdict(list)
            for weight in weights:
                owned[owner.get(weight.index)].append(weight)
            for members in owned.values():
                self._house([group for group, _ in self._split(members, [0] * len(members))])
            self._move_in()
            return
        spans: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number, group in enumerate(planned):
            if group.payload != "grad":
                spans[group.payload, group.span].append(number)
        for numbers in spans.values():
            for number in numbers:
                group = planned[number]
                grouped: list[Member] = [weights[tensor] for tensor in group.tensors]
                if group.payload == "sum":
                    totals = [Sum(weights[tensor]) for tensor in group.tensors]
                    for total in totals:
                        total.weight.total = total
                    grouped = list(totals)
                if group.payload == "state":
                    grouped = [weights[tensor].states for tensor in group.tensors]
                    for tensor, size in zip(group.tensors, group.sizes, strict=True):
                        weights[tensor].states.room = size
                self.parts[number] = tuple(self._split(grouped, group.sizes))
            self._house([live for number in numbers for live, _ in self.parts[number]])
        self._move_in()

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

    def _move_in(self) -> None:
        if self._common is not None:
            self._common.move_in()

    def _house(self, groups: Sequence[LiveGroup]) -> None:
        """Make host memory for groups of one span: side by side, but for those whose memory stays."""
        self.all += groups
        common = [group for group in groups if self._common is not None and self._common.takes(group)]
        if self._common is not None and common:
            self._common.add(common)
            groups = [group for group in groups if group not in common]
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
    # Nothing has to stand beside it, so it can stay in its memory, where others may hold it.
    if len(members) == 1 and isinstance(first, Weight) and first.host.is_contiguous():
        first.rehost(device.host_adopt(first.host))
        groups[0].host = groups[0].span = first.host.view(-1).view(torch.uint8)
        return
    owners = [(member, member if isinstance(member, Weight) else member.weight) for member in members]
    parts = [
        ((member.room,), torch.uint8) if isinstance(member, States) else (tuple(weight.host.shape), weight.host.dtype)
        for member, weight in owners
    ]
    span, tensors = device.host_group(parts)
    for member, tensor in zip(members, tensors, strict=True):
        if isinstance(member, Weight):
            tensor.copy_(member.host)
            member.rehost(tensor)
        elif isinstance(member, Sum):
            member.host = tensor
        else:
            member.slot = tensor
    at = 0
    for group in groups:
        group.host, group.span = span[at : at + group.nbytes], span
        at += group.room


def move_rest(model: nn.Module, structure: Structure, device: torch.device) -> None:
    """Move parameters and buffers outside the blocks' tensors: in training they live on the device all the time."""
    for _, param in structure.rest:
        if param.device != device:
            param.data = param.data.to(device)
        if param.grad is not None and param.grad.device != device:
            param.grad.data = param.grad.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                buffers_of(module)[name] = buffer.to(device)
