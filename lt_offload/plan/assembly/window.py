"""Plans for windows: several micro-batches per update, from a plan for one.

While it is planned, the sum of a tensor's gradients counts as one more of its optimizer states (:func:`with_sums`). A
plan for such a profile then has room for the sums wherever they are needed, at any time, and no planner has to know of
them. :func:`windowed` takes its ops apart into those of an accumulating and of an updating pass: what an accumulating
pass has to do is a part of what was planned, with the same groups at the same places at the same time. In the first
pass of a window, gradients for the host are copied to where their sums are, instead of being added to nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lt_offload.plan.iteration.durations import accumulated, added, durations, gathered
from lt_offload.plan.iteration.memory import STATE_PADDING, aligned, state_room
from lt_offload.plan.iteration.settling import with_settling_pass
from lt_offload.schema.accesses import IN_ARENA, takes_room
from lt_offload.schema.plan import ADDING, InitialCopy, Op, Pass, Payload, Plan, TensorGroup
from lt_offload.schema.profile import Profile, TensorProfile

_EVERY: tuple[Pass, ...] = (*ADDING, "updating")
_ALL: frozenset[Pass] = frozenset(_EVERY)
_ADDING: frozenset[Pass] = frozenset(ADDING)
_BEGINNING: frozenset[Pass] = frozenset({"beginning"})
_UPDATING: frozenset[Pass] = frozenset({"updating"})
UNCOUNTED = 1 << 16
"""Bytes of RAM that are kept: where a tensor has no states, its sum as a state takes a few bytes less than it does."""


def with_sums(profile: Profile, window: int, *, mean: bool = True) -> Profile:
    """Return ``profile`` with sums of gradients as states.

    ``mean``: with updates as fast as in the mean pass of a window; else as those of its last one.
    """
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    updated = sum(tensor.bytes for tensor in trained)
    # A window updates once and adds up in every pass; on the host in all but the first.
    once = 1 / window if mean else 1.0
    share = once + (sum(map(added, trained)) / updated if updated else 0.0)
    on_host = once
    if updated:
        adding = (1 - once if mean else 1.0) * sum(accumulated(tensor, profile) for tensor in trained)
        on_host += (once * sum(gathered(tensor, profile) for tensor in trained) + adding) / updated
    optimizer = profile.optimizer
    return replace(
        profile,
        hardware=replace(profile.hardware, host_bytes=max(1, profile.hardware.host_bytes - UNCOUNTED)),
        tensors=tuple(_with_sum(tensor) if tensor.trainable else tensor for tensor in profile.tensors),
        optimizer=replace(
            optimizer,
            host_bytes_per_s=optimizer.host_bytes_per_s / on_host,
            host_speeds={threads: speed / on_host for threads, speed in optimizer.host_speeds.items()},
            device_bytes_per_s=optimizer.device_bytes_per_s / share,
        ),
    )


def without_gradients(profile: Profile) -> Profile:
    """Return ``profile`` with every tensor frozen: the least work of each pass of a window."""
    frozen = tuple(replace(tensor, trainable=False, state_bytes=0) for tensor in profile.tensors)
    return replace(profile, tensors=frozen, forwards=1, deferred_forwards=0)


def _with_sum(tensor: TensorProfile) -> TensorProfile:
    """Return ``tensor`` with states that take as much of the arena as its states and a sum side by side."""
    # state_room() adds the padding again, and comes to the sum of both rooms.
    total = aligned(tensor.bytes)
    return replace(tensor, state_bytes=state_room(tensor.state_bytes) + total - STATE_PADDING, sum_bytes=total)


def windowed(plan: Plan, profile: Profile, window: int, *, delayed: bool = False) -> Plan:
    """Return the plan for windows that ``plan`` has room for; its prediction is that of ``plan``.

    Args:
        plan: made for :func:`with_sums` of ``profile``.
        profile: what it is for.
        window: micro-batches per update.
        delayed: whether updates wait until all gradients are there.
    """
    split = _Split(plan, profile, delayed=delayed)
    split.run()
    result = replace(
        plan,
        window=window,
        delayed=delayed,
        groups=tuple(split.groups),
        initial=tuple(split.initial),
        ops=tuple(split.linked()),
        notes=tuple(
            note.replace("of optimizer states", "of optimizer states and sums of gradients") for note in plan.notes
        ),
    )
    if delayed:
        result = with_settling_pass(result, profile)
        result = replace(result, ops=tuple(_after_former_occupants(result)))
    timed = zip(result.ops, durations(result, profile.with_host_threads(plan.host_threads)), strict=True)
    return replace(result, ops=tuple(replace(op, seconds=seconds) for op, seconds in timed))


def _after_former_occupants(plan: Plan) -> Iterator[Op]:
    """Yield the ops of ``plan``, copies to the device after all that any pass may have had in their ranges.

    As a rule the last occupant of a range has waited for those before. In a settling pass it may not have been there.
    """
    ranges: dict[int, set[tuple[int, int]]] = defaultdict(set)
    leaves: dict[int, list[int]] = defaultdict(list)
    for copy in plan.initial:
        ranges[copy.group].add((copy.offset, copy.offset + plan.groups[copy.group].bytes))
    for op in plan.ops:
        for g, offset in zip(op.groups, op.offsets, strict=False):
            ranges[g].add((offset, offset + plan.groups[g].bytes))
        for g in op.groups if op.payload in IN_ARENA and not takes_room(op) else ():
            leaves[g].append(op.id)
    occupants = [(low, high, leaves[g]) for g, held in ranges.items() for low, high in held]
    for op in plan.ops:
        after = set(op.after)
        for g, offset in zip(op.groups, op.offsets, strict=False):
            end = offset + plan.groups[g].bytes
            after.update(*(left for low, high, left in occupants if low < end and offset < high))
        yield replace(op, after=tuple(sorted(after)))


class _Split:
    """The ops of ``plan`` for windows. An op of ``plan`` may become several, and others may wait for all of them."""

    def __init__(self, plan: Plan, profile: Profile, *, delayed: bool) -> None:
        self.plan, self.profile, self.delayed = plan, profile, delayed
        self.groups: list[TensorGroup] = list(plan.groups)
        self.initial: list[InitialCopy] = []
        self.ops: list[Op] = []
        """With the ids of ``plan`` in ``after``."""
        self._states: dict[int, int | None] = {}
        """By group of states in ``plan``: the group of its states proper, None without any."""
        self._sums: dict[int, int] = {}
        """By the same: the group of sums."""
        self._moved = {g for op in plan.ops if op.payload == "state" for g in op.groups}
        self._starts = {copy.group for copy in plan.initial}
        self._became: dict[int, list[int]] = {}
        """By op of ``plan``: the ops in its place; an op that waited for it waits for all of them."""
        self._added: dict[int, int] = {}
        """By update of ``plan``: the op that adds up instead."""
        self._reduced: dict[int, int] = {}
        """By tensor: the op in which machines add up."""
        self._between = delayed and profile.machines > 1 and profile.common_updates
        """True: there are such ops."""
        self._begins: set[int] = set()
        """The ops that copy gradients to where their sums are."""
        self._sent = {t for op in plan.ops if op.sends_gradients for t in plan.tensors(op)}
        self._ends: dict[int, list[tuple[Op, frozenset[Pass]]]] = defaultdict(list)
        """By step: drops that stand at its end."""
        self._backwards: dict[int, int] = {}
        """By block."""
        self._fetches: dict[int, set[int]] = defaultdict(set)
        """By tensor: the copies of its weight to the device."""
        self._divide_groups()

    def run(self) -> None:
        """Write every op."""
        step = 0
        for op in self.plan.ops:
            while op.step > step:
                self._end(step)
                step += 1
            self._became[op.id] = list(self._write(op))
        for left in range(step, len(self.plan.timeline)):
            self._end(left)

    def linked(self) -> Iterator[Op]:
        """Yield the ops with their dependencies."""
        readers: dict[int, list[int]] = defaultdict(list)
        users: dict[int, list[int]] = defaultdict(list)
        for update, adds in self._added.items():
            for t in self.plan.tensors(self.plan.ops[update]):
                readers[t].append(adds)
                users[t] += (adds, *self._became[update])
        self._backwards = {op.block: op.id for op in self.ops if op.kind == "backward"}
        for op in self.ops:
            if op.kind == "prefetch" and op.payload == "weight":
                for t in (t for g in op.groups for t in self.groups[g].tensors):
                    self._fetches[t].add(op.id)
        waits: dict[int, set[int]] = defaultdict(set)
        for op in self.ops:
            if op.kind == "reduce":  # the sums of this machine are complete
                waits[op.id] = {begins for begins in self._begins if self._overlap(op, self.ops[begins])} | {op.id - 2}
            if op.payload == "grad":  # the sums have taken what came in the pass before
                uses = users if op.id in self._begins else readers
                waits[op.id] = {user for g in op.groups for t in self.groups[g].tensors for user in uses[t]}
                # It is the backward that writes there, and it begins before the op that stands for what it writes.
                if op.writes_gradients:
                    waits[self._backwards[op.block]] |= waits[op.id]
        if self.delayed:
            # The norm is that of all gradients, so no update comes before any of them.
            complete = {op.id for op in self.ops if op.kind == "accumulate"} | self._begins
            if self.profile.added_up_first:
                complete |= {op.id for op in self.ops if op.kind == "reduce"}
            for op in self.ops:
                waits[op.id] |= self._before_settling(op) | (complete if op.kind == "update" else set())
        for op in self.ops:
            after = {new for old in op.after for new in self._became[old]} | waits[op.id]
            if op.payload == "grad":  # what was at its place has been used
                after |= {self._added[old] for old in op.after if old in self._added}
            if op.kind == "accumulate" and op.lane == "host":
                # `_write` puts the update of these sums right behind it. Numbers that are not smaller mean passes
                # before: the sums must have the gradients of the last one that added, or have been used up. The host's
                # lane keeps no order that says so.
                after |= {op.id, op.id + 1}  # of passes before
            elif op.updates_on_host:
                # And the same from the update's side: its sums are complete when the adding right before it, of the
                # last pass, is.
                after |= {op.id - 1}
            if op.kind in ("accumulate", "update") or op.id in self._begins:
                after |= {self._reduced[t] for g in op.groups for t in self.groups[g].tensors if t in self._reduced}
            yield replace(op, after=tuple(sorted(after)))

    def _before_settling(self, op: Op) -> set[int]:
        """Return further ops that ``op`` has to wait for where no computations have waited in the same pass.

        Updates wait for the copies of their weights, and the next occupants of a range for the last computation there.
        """
        tensors = {t for g in op.groups for t in self.groups[g].tensors}
        if op.kind == "update":
            return {fetch for t in tensors for fetch in self._fetches[t]}
        if op.kind == "drop" and op.payload == "weight":
            return {self._backwards[block] for t in tensors for block in self.profile.tensors[t].blocks}
        return set()

    # -- groups ------------------------------------------------------------------------------------------------------

    def _divide_groups(self) -> None:
        spans = max((group.span for group in self.groups), default=0) + 1
        for number, group in enumerate(self.plan.groups):
            if group.payload != "state":
                continue
            tensors = [self.profile.tensors[t] for t in group.tensors]
            states = [(t, state_room(tensor.state_bytes)) for t, tensor in zip(group.tensors, tensors, strict=True)]
            states = [(t, size) for t, size in states if size]
            sums = TensorGroup(
                payload="sum",
                tensors=group.tensors,
                sizes=tuple(aligned(tensor.bytes) for tensor in tensors),
                span=group.span + spans,
            )
            if states:
                kept = tuple(t for t, _ in states)
                self.groups[number] = replace(group, tensors=kept, sizes=tuple(size for _, size in states))
                self._states[number], self._sums[number] = number, len(self.groups)
                self.groups.append(sums)
            else:
                self._states[number], self._sums[number] = None, number
                self.groups[number] = sums
        for copy in self.plan.initial:
            if copy.group in self._sums:
                self.initial += [
                    InitialCopy(group=g, offset=offset) for g, offset in self._parts(copy.group, copy.offset)
                ]
            else:
                self.initial.append(copy)

    def _parts(self, number: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the groups made of a group of states of the plan, with their offsets: states first, then sums."""
        states = self._states[number]
        if states is not None:
            yield states, offset
            offset += self.groups[states].bytes
        yield self._sums[number], offset

    # -- ops ---------------------------------------------------------------------------------------------------------

    def _write(self, op: Op) -> Iterator[int]:
        """Write the ops that replace ``op``; yield those that others wait for in its place."""
        if op.kind == "update":
            # Sums that a copy has begun are there: adding is what later passes do.
            later = op.lane == "host" and not self._sent.isdisjoint(self.plan.tensors(op))
            adds = self._add(replace(op, kind="accumulate"), only=_ADDING - _BEGINNING if later else _ADDING)
            self._added[op.id] = adds
            update = self._add(op, only=_UPDATING)
            if op.lane == "host":
                # Its adding changes nothing on the device, so nobody there waits for it; copies of gradients do, see
                # `linked`.
                self._house_sums(op)
                if self._between:
                    self._reduce(op)
            else:
                yield adds
            yield update
        elif op.payload == "state":
            yield from self._move_states(op)
        elif op.payload == "weight" and op.kind == "offload" and self._updated_before(op):
            yield self._add(op, only=_UPDATING)  # nothing is newer in other passes
            if op.release_after is not None:
                self._leave(op, op.groups, "weight", only=_ADDING)
        elif op.sends_gradients:
            yield self._begin_sums(op)
            yield self._add(op, only=_ALL - _BEGINNING)
        else:
            yield self._add(op)

    def _reduce(self, op: Op) -> None:
        """Write the op in which machines add up the sums that ``op``, an update on the host, uses."""
        nbytes = sum(self.profile.tensors[t].bytes for t in self.plan.tensors(op))
        reduction = self._add(replace(op, kind="reduce", lane="network", bytes=nbytes, after=()), only=_ADDING)
        self._reduced |= dict.fromkeys(self.plan.tensors(op), reduction)

    def _overlap(self, op: Op, other: Op) -> bool:
        """Return whether both name some tensor."""
        one, two = ({t for g in which.groups for t in self.groups[g].tensors} for which in (op, other))
        return not one.isdisjoint(two)

    def _updated_before(self, op: Op) -> bool:
        """Return whether the weights that ``op`` copies were updated in the same pass, and not in the one before."""
        tensors = set(self.plan.tensors(op))
        updates = (
            other
            for other in self.plan.ops
            if other.kind == "update" and not tensors.isdisjoint(self.plan.tensors(other))
        )
        return all(update.id < op.id for update in updates)

    def _move_states(self, op: Op) -> Iterator[int]:
        """Write the copies of states, which travel for the update, and of sums, which travel in every pass."""
        states = [g for g in (self._states[number] for number in op.groups) if g is not None]
        sums = [self._sums[number] for number in op.groups]
        stays = [g for g in states if g in self._starts]
        if op.kind == "prefetch":
            placed = dict(
                part
                for number, offset in zip(op.groups, op.offsets, strict=True)
                for part in self._parts(number, offset)
            )
            # What is on the device at the start of a pass has to be there at its end in passes of every kind, so it is
            # fetched in all.
            travelling = [g for g in states if g not in stays]
            yield from self._some(op, travelling, "state", only=_UPDATING, offsets=[placed[g] for g in travelling])
            yield from self._some(op, stays, "state", offsets=[placed[g] for g in stays])
            yield from self._some(op, sums, "sum", offsets=[placed[g] for g in sums])
            return
        # Out goes what the pass has changed: states by updates, sums by adding. The rest only makes room.
        yield from self._some(op, states, "state", only=_UPDATING)
        yield from self._some(op, sums, "sum", only=_ADDING)
        self._leave(op, stays, "state", only=_ADDING)
        self._leave(op, sums, "sum", only=_UPDATING)

    def _some(
        self,
        op: Op,
        groups: Sequence[int],
        payload: Payload,
        *,
        only: frozenset[Pass] = _ALL,
        offsets: Sequence[int] = (),
    ) -> Iterator[int]:
        if groups:
            nbytes = self._bytes(groups)
            copy = replace(op, payload=payload, groups=tuple(groups), offsets=tuple(offsets), bytes=nbytes)
            yield self._add(copy, only=only)

    def _leave(self, op: Op, groups: Sequence[int], payload: Payload, *, only: frozenset[Pass]) -> None:
        """Drop ``groups`` in passes of some kinds where ``op`` gives them back in those of the others."""
        if groups:
            assert op.release_after is not None
            drop = replace(
                op,
                kind="drop",
                lane="none",
                payload=payload,
                groups=tuple(groups),
                offsets=(),
                bytes=self._bytes(groups),
            )
            # A drop gives its memory back where it stands, so it has to stand where the copy to the host would have
            # given it back.
            self._ends[op.release_after].append((replace(drop, step=op.release_after, release_after=None), only))

    def _end(self, step: int) -> None:
        for drop, only in self._ends.pop(step, ()):
            self._add(drop, only=only)

    def _begin_sums(self, op: Op) -> int:
        """Write the copy of gradients to the place of their sums; it waits for no user of the gradients' own memory."""
        (number,) = op.groups
        self.groups.append(replace(self.groups[number], host_offset=None))
        after = tuple(other for other in op.after if self.plan.ops[other].lane != "host")
        begins = self._add(replace(op, groups=(len(self.groups) - 1,), after=after), only=_BEGINNING)
        self._begins.add(begins)
        return begins

    def _house_sums(self, op: Op) -> None:
        """Let the sums for an update on the host have a group, which never leaves it."""
        tensors = self.plan.tensors(op)
        sizes = tuple(aligned(self.profile.tensors[t].bytes) for t in tensors)
        span = max(group.span for group in self.groups) + 1
        self.groups.append(TensorGroup(payload="sum", tensors=tensors, sizes=sizes, span=span))

    def _add(self, op: Op, *, only: frozenset[Pass] = _ALL) -> int:
        self.ops.append(replace(op, id=len(self.ops), passes=tuple(which for which in _EVERY if which in only)))
        return len(self.ops) - 1

    def _bytes(self, groups: Sequence[int]) -> int:
        tensors = [(self.groups[g].payload, self.profile.tensors[t]) for g in groups for t in self.groups[g].tensors]
        return sum(tensor.state_bytes if payload == "state" else tensor.bytes for payload, tensor in tensors)
