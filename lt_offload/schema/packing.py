"""How well a plan fills its arena, and how many transfers it makes. Knows the plan only, and changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lt_offload.schema.plan import Op, Payload, Plan

_Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """What the arena of a plan holds, in bytes, and how its tensors travel."""

    extent: int
    live_peak: int
    """Most bytes in use at a time, as memory is taken and given back in the order of issue."""
    tensors: int
    """Weights, and sets of states of one tensor, that are copied in an iteration; each counts every time."""
    transfers: int
    """Ranges that are copied in an iteration: tensors that lie side by side are one."""

    @property
    def waste(self) -> float:
        """By how much the extent is larger than the peak of live bytes, as part of that."""
        return self.extent / self.live_peak - 1 if self.live_peak else 0.0


def packing(plan: Plan) -> Packing:
    """Return what ``plan`` makes of its arena.

    Host copies of tensors that are in the same ops lie side by side, in ascending order; so may their device copies.
    """
    assert plan.weight_bytes, "the plan does not say how large its weights are"
    walk = _Walk(plan)
    for _ in range(2):  # what is released after the last step is released at the end of an iteration
        walk.iteration()
    return Packing(extent=plan.arena_bytes, live_peak=walk.peak, tensors=walk.tensors, transfers=walk.transfers)


def transfer_groups(plan: Plan, payload: Payload) -> list[tuple[int, ...]]:
    """Return the tensors whose weights, gradients or states, as ``payload`` says, are in the same ops.

    Each group ascends; those that are never copied are one group.
    """
    ops: list[list[int]] = [[] for _ in plan.update_places]
    for op in plan.ops:
        if op.payload == payload and op.kind in ("prefetch", "offload"):
            for tensor in op.tensors:
                ops[tensor].append(op.id)
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for tensor, travels in enumerate(ops):
        found[tuple(travels)].append(tensor)
    return [tuple(tensors) for tensors in found.values()]


class _Walk:
    """What is in the arena while the ops are issued."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.group: dict[_Key, int] = {
            (payload, tensor): number
            for payload in ("weight", "state")
            for number, tensors in enumerate(transfer_groups(plan, payload))
            for tensor in tensors
        }
        self.at: dict[_Key, int] = {(entry.payload, entry.tensor): entry.offset for entry in plan.initial}
        self.live = self.peak = sum(map(self._bytes, self.at))
        self.tensors = self.transfers = 0
        self._releases: dict[int, list[_Key]] = defaultdict(list)

    def iteration(self) -> None:
        """Issue every op once."""
        self.tensors = self.transfers = 0
        step = 0
        for op in self.plan.ops:
            if op.step != step:
                self._end(step)
                step = op.step
            if op.payload in ("weight", "state"):
                self._issue(op, [(op.payload, tensor) for tensor in op.tensors])
        self._end(step)

    def _issue(self, op: Op, keys: Sequence[_Key]) -> None:
        if op.kind == "drop":
            self._forget(keys)
            return
        if op.kind == "prefetch":
            self.at.update(zip(keys, op.offsets, strict=True))
            self.live += sum(map(self._bytes, keys))
            self.peak = max(self.peak, self.live)
        elif op.release_after is not None:
            self._releases[op.release_after] += keys
        self.tensors += len(keys)
        self.transfers += sum(1 for _ in self._ranges(keys))

    def _ranges(self, keys: Sequence[_Key]) -> Iterator[int]:
        """Yield where each range begins of those that make up ``keys`` here and on the host."""
        ends: dict[int, int] = {}
        for key in sorted(keys):
            group, offset = self.group[key], self.at[key]
            if ends.get(group) != offset:
                yield offset
            ends[group] = offset + self._bytes(key)

    def _end(self, step: int) -> None:
        self._forget(self._releases.pop(step, ()))

    def _forget(self, keys: Sequence[_Key]) -> None:
        for key in keys:
            del self.at[key]
            self.live -= self._bytes(key)

    def _bytes(self, key: _Key) -> int:
        payload, tensor = key
        return (self.plan.weight_bytes if payload == "weight" else self.plan.state_bytes)[tensor]
