"""Tensor groups: tensors that the same ops name, and that lie side by side wherever they go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from lt_offload.plan.assembly.ops import Draft, Emitter
from lt_offload.plan.iteration.memory import aligned
from lt_offload.schema.accesses import IN_ARENA
from lt_offload.schema.plan import InitialCopy, Op, Payload, Plan, TensorGroup

_Key = tuple[Payload, int]
"""Payload and tensor."""
_ALIKE = tuple({each.name for each in fields(Draft)} & {each.name for each in fields(Op)} - {"offsets", "zero_copy"})
"""The fields that a draft and its op have in common, and that name no tensors."""
_AT_START = -1
"""The number, in place of an op's, of copies that are on the device from the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """The groups of a plan, and its ops over them."""

    groups: tuple[TensorGroup, ...]
    ops: tuple[Op, ...]
    initial: tuple[InitialCopy, ...]


def group_tensors(
    drafts: Sequence[Draft],
    initial: Mapping[_Key, int],
    *,
    weight_bytes: Sequence[int],
    state_bytes: Sequence[int],
    sum_bytes: Sequence[int] = (),
    first_block: Sequence[int],
) -> Grouped:
    """Return the ops of ``drafts`` over groups of tensors.

    Args:
        drafts: all ops of an iteration.
        initial: arena offsets of what is on the device at the start.
        weight_bytes: per tensor, what its weight takes of the arena.
        state_bytes: per tensor, what its states take.
        sum_bytes: per tensor, what the sum of its gradients takes; empty: gradients are not added up.
        first_block: per tensor, the first block that uses it.
    """
    offsets, uses = _offsets(drafts, initial), _uses(drafts)
    groups: list[TensorGroup] = []
    span = 0
    of_arena: Mapping[Literal["weight", "state", "sum"], Sequence[int]]
    of_arena = {"weight": weight_bytes, "state": state_bytes, "sum": sum_bytes}
    for payload, sizes in of_arena.items():
        keys: list[_Key] = [(payload, tensor) for tensor in range(len(sizes))]
        together: dict[tuple[int | None, int], list[_Key]] = defaultdict(list)
        for key in keys:
            if payload == "weight" or key in offsets or (payload == "sum" and sizes[key[1]]):
                # Weights that never move are in no op. Without the block they would be one group of the whole model.
                together[next(iter(offsets.get(key, {})), None), first_block[key[1]]].append(key)
        for members in together.values():
            members.sort(key=lambda key: (next(iter(offsets.get(key, {}).values()), 0), key[1]))
            for part in _parts(members, offsets, uses, sizes):
                tensors = tuple(tensor for _, tensor in part)
                groups.append(
                    TensorGroup(
                        payload=payload, tensors=tensors, sizes=tuple(sizes[tensor] for tensor in tensors), span=span
                    )
                )
            # Weights and states are apart in host memory, so no copy can move both.
            span += 1
    of: dict[tuple[str, int], int] = {}
    """The group of each payload and tensor."""
    for number, group in enumerate(groups):
        of.update(((group.payload, tensor), number) for tensor in group.tensors)
    ops = []
    for draft in drafts:
        if draft.payload == "grad":
            # A group for every copy of gradients: where they arrive on the host is said by the group.
            of.update((("grad", tensor), len(groups)) for tensor in draft.tensors)
            taken = tuple(weight_bytes[tensor] for tensor in draft.tensors)
            if draft.rows == "looked up":
                taken = (aligned(draft.bytes),)
            groups.append(
                TensorGroup(payload="grad", tensors=draft.tensors, sizes=taken, host_offset=draft.host_offset)
            )
        ops.append(_over_groups(draft, groups, of))
    copies = dict.fromkeys(of[key] for key in initial)
    return Grouped(
        groups=tuple(groups),
        ops=tuple(ops),
        initial=tuple(InitialCopy(group=g, offset=initial[groups[g].payload, groups[g].tensors[0]]) for g in copies),
    )


def _over_groups(draft: Draft, groups: Sequence[TensorGroup], of: Mapping[tuple[str, int], int]) -> Op:
    payload = draft.payload or "weight"  # updates name the weights that they change
    numbers = tuple(dict.fromkeys(of[payload, tensor] for tensor in draft.tensors))
    offset = dict(zip(draft.tensors, draft.offsets, strict=False))
    return Op(
        **{name: getattr(draft, name) for name in _ALIKE},
        groups=numbers,
        offsets=tuple(offset[groups[number].tensors[0]] for number in numbers) if offset else (),
        zero_copy=tuple(dict.fromkeys(of["weight", tensor] for tensor in draft.zero_copy)),
    )


def _parts(
    members: Sequence[_Key],
    offsets: Mapping[_Key, Mapping[int, int]],
    uses: Mapping[_Key, Sequence[int]],
    sizes: Sequence[int],
) -> Iterator[list[_Key]]:
    """Yield ``members``, in the order of their offsets, in parts that are in the same ops and side by side in each."""
    part: list[_Key] = []
    for key in members:
        if part:
            here, behind = offsets.get(part[-1], {}), offsets.get(key, {})
            # Side by side in one stay is not enough: the group is copied as one range in all of them.
            follows = all(behind.get(op) == offset + sizes[part[-1][1]] for op, offset in here.items())
            if here.keys() != behind.keys() or uses.get(part[-1]) != uses.get(key) or not follows:
                yield part
                part = []
        part.append(key)
    yield part


def _offsets(drafts: Sequence[Draft], initial: Mapping[_Key, int]) -> dict[_Key, dict[int, int]]:
    offsets: defaultdict[_Key, dict[int, int]] = defaultdict(dict)
    for draft in drafts:
        if draft.kind == "prefetch" and draft.payload in IN_ARENA:
            for tensor, offset in zip(draft.tensors, draft.offsets, strict=True):
                offsets[draft.payload, tensor][draft.id] = offset
    for key, offset in initial.items():
        offsets[key][_AT_START] = offset
    return dict(offsets)


def _uses(drafts: Sequence[Draft]) -> dict[_Key, list[int]]:
    uses: defaultdict[_Key, list[int]] = defaultdict(list)
    for draft in drafts:
        for payload in IN_ARENA:
            if draft.payload in (payload, "grad", None):
                for tensor in (*draft.tensors, *draft.zero_copy):
                    uses[payload, tensor].append(draft.id)
    return dict(uses)


def take_slots(emitted: Emitter, like: Plan | None) -> int:
    """Give gradients that are copied to the host their places there; return the extent of all.

    Args:
        emitted: the ops. What begins sums is copied to where these are. Rows that are looked up have a place of their
            own, the last one.
        like: a plan for one batch with the same timetable, whose places they take, and what they wait for because of
            that. None: no two share any; see :mod:`lt_offload.plan.planners.slots` for that.
    """
    drafts = [draft for draft in emitted.ops if draft.payload == "grad" and draft.lane == "d2h"]
    drafts = [draft for draft in drafts if draft.passes != ("beginning",)]
    extent = 0
    for draft in drafts if like is None else ():
        draft.host_offset = extent
        extent += sum(aligned(emitted.profile.tensors[t].bytes) for t in draft.tensors)
    if like is not None:
        of_rows = drafts.pop() if emitted.table is not None else None
        for draft, op in zip(drafts, (op for op in like.ops if op.sends_gradients), strict=True):
            draft.host_offset = like.groups[op.groups[0]].host_offset
            updates = (like.ops[other] for other in op.after if like.ops[other].updates_on_host)
            former = (user for update in updates for t in like.tensors(update) for user in emitted.users(t))
            draft.after = tuple(sorted({*draft.after, *former}))
        extent = like.gradient_bytes
        if of_rows is not None:
            of_rows.host_offset = extent
    return extent
