"""The use of a plan's arena, and the number of its transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lt_offload.schema.accesses import IN_ARENA, takes_room

if TYPE_CHECKING:
    from lt_offload.schema.plan import Op, Pass, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Use of a plan's arena, in bytes, and the number of copies to and from it."""

    extent: int
    live_peak: int
    """Most bytes in use at a time, as memory is taken and given back in the order of issue."""
    tensors: int
    """Weights, and sets of states of one tensor, that are copied in an iteration; each counts every time."""
    transfers: int
    """Ranges that are copied in an iteration: groups that lie side by side here and on the host are one."""

    @property
    def waste(self) -> float:
        """Relative excess of the extent over the peak of live bytes."""
        return self.extent / self.live_peak - 1 if self.live_peak else 0.0


def packing(plan: Plan) -> Packing:
    """Return the use that ``plan`` makes of its arena."""
    walk = _ArenaWalk(plan)
    copied: dict[Pass, tuple[int, int]] = {}
    for which in (*plan.passes, *plan.passes):  # what is released after the last step is released at the end of a pass
        copied[which] = walk.run(which)
    # Where updates wait, they are in a pass of their own; the first pass copies what every other one does.
    counted = [copied[which] for which in ((plan.passes[0], plan.passes[-1]) if plan.delayed else plan.passes[-1:])]
    tensors, transfers = (sum(numbers) for numbers in zip(*counted, strict=True))
    return Packing(extent=plan.arena_bytes, live_peak=walk.peak, tensors=tensors, transfers=transfers)


class _ArenaWalk:
    """Contents of the arena while the ops are issued."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.offsets: dict[int, int] = {entry.group: entry.offset for entry in plan.initial}
        """Arena offset of each group on the device."""
        self.live = self.peak = sum(plan.groups[group].bytes for group in self.offsets)
        self.tensors = self.transfers = 0
        self._releases: dict[int, list[int]] = defaultdict(list)

    def run(self, which: Pass) -> tuple[int, int]:
        """Issue every op of a pass; return how many tensors it copies, and in how many transfers."""
        self.tensors = self.transfers = 0
        step = 0
        for op in self.plan.program(which):
            if op.step != step:
                self._end(step)
                step = op.step
            if op.payload in IN_ARENA:
                self._issue(op)
        self._end(step)
        return self.tensors, self.transfers

    def _issue(self, op: Op) -> None:
        if op.kind == "drop":
            self._forget(op.groups)
            return
        if takes_room(op):
            self.offsets.update(zip(op.groups, op.offsets, strict=True))
            self.live += sum(self.plan.groups[group].bytes for group in op.groups)
            self.peak = max(self.peak, self.live)
        elif op.release_after is not None:
            self._releases[op.release_after] += op.groups
        self.tensors += len(self.plan.tensors(op))
        self.transfers += sum(1 for _ in self._ranges(op.groups))

    def _ranges(self, groups: Sequence[int]) -> Iterator[int]:
        """Yield the start of each range that is contiguous here and on the host, together all of ``groups``."""
        before, end = -1, 0
        # Numbers within a span ascend as the groups lie on the host, so only neighbours in number can be one range.
        for number in sorted(groups):
            group, offset = self.plan.groups[number], self.offsets[number]
            joined = before == number - 1 and self.plan.groups[before].span == group.span
            if not joined or self.plan.groups[before].payload != group.payload or end != offset:
                yield offset
            before, end = number, offset + group.bytes

    def _end(self, step: int) -> None:
        self._forget(self._releases.pop(step, ()))

    def _forget(self, groups: Sequence[int]) -> None:
        for group in groups:
            del self.offsets[group]
            self.live -= self.plan.groups[group].bytes
