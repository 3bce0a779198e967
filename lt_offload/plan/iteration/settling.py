"""The settling pass of a plan whose updates wait: the updates of a pass, with the copies that they need.

A settling pass begins and ends with what is on the device at the start of every pass, and computes nothing. So weights
that a pass fetches for a computation alone are not fetched there, and what leaves to come back later stays, unless
something that an update needs takes its place meanwhile. Where an op moves some groups that a settling pass needs and
others that it does not, the settling pass has an op of its own for those that it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lt_offload.schema.accesses import IN_ARENA, takes_room
from lt_offload.schema.plan import InitialCopy, Op, Plan, TensorGroup
from lt_offload.schema.profile import Profile


def with_settling_pass(plan: Plan, profile: Profile) -> Plan:
    """Return ``plan`` with a settling pass in the place of its updating one.

    Args:
        plan: with an updating pass that ends where it begins; what ops wait for is said.
        profile: what it is for.
    """
    needed = _needed(plan.program("updating"), plan.groups, plan.initial)
    ops: list[Op] = []
    became: dict[int, range] = {}
    """By op of ``plan``: the ops in its place, none where no pass carries it out any more."""
    for op in plan.ops:
        divided = [part for part in _divided(op, needed.get(op.id, ()), plan, profile) if part.passes]
        became[op.id] = range(len(ops), len(ops) + len(divided))
        ops += divided
    return replace(
        plan,
        ops=tuple(
            replace(op, id=number, after=tuple(sorted(new for old in op.after for new in became[old])))
            for number, op in enumerate(ops)
        ),
    )


def _divided(op: Op, needed: Sequence[tuple[tuple[int, ...], bool]], plan: Plan, profile: Profile) -> Iterator[Op]:
    """Yield ``op`` as other passes carry it out, and those that a settling pass has instead."""
    passes = tuple(which for which in op.passes if which != "updating")
    parts = [
        _part(replace(op, passes=("settling",)), kept, plan, profile, stay=stay)
        for kept, stay in needed
        if kept != op.groups or stay
    ]
    yield replace(op, passes=passes if len(parts) == len(needed) else (*passes, "settling"))
    yield from parts


def _part(op: Op, groups: tuple[int, ...], plan: Plan, profile: Profile, *, stay: bool) -> Op:
    """Return ``op``, which moves weights, states or sums, for some of its groups; ``stay``: they do not leave."""
    offsets = dict(zip(op.groups, op.offsets, strict=False))
    tensors = [profile.tensors[t] for group in groups for t in plan.groups[group].tensors]
    return replace(
        op,
        groups=groups,
        offsets=tuple(offsets[group] for group in groups if group in offsets),
        bytes=sum(tensor.state_bytes if op.payload == "state" else tensor.bytes for tensor in tensors),
        release_after=None if stay else op.release_after,
    )


def _needed(
    ops: Sequence[Op], groups: Sequence[TensorGroup], initial: Sequence[InitialCopy]
) -> dict[int, list[tuple[tuple[int, ...], bool]]]:
    """Return the groups for which a settling pass carries out an op of ``ops``, by op.

    And whether these stay on the device, though others that ``ops`` are for leave it.
    """
    moving = {copy.group for copy in initial}
    moving |= {g for op in ops if op.kind == "update" and op.lane != "host" for g in op.groups}
    moving |= {g for g, group in enumerate(groups) if group.payload in ("state", "sum")}
    moves = [op for op in ops if op.kind == "update" or op.payload in IN_ARENA]
    spared, staying = _Detours(moves, groups, initial).unneeded()
    needed: dict[int, list[tuple[tuple[int, ...], bool]]] = defaultdict(list)
    for op in moves:
        if op.kind == "update":
            needed[op.id].append((op.groups, False))
            continue
        kept = [group for group in op.groups if group in moving and (op.id, group) not in spared]
        for stay in (False, True):
            alike = tuple(group for group in kept if ((op.id, group) in staying) is stay)
            if alike:
                needed[op.id].append((alike, stay))
    return needed


@dataclass(eq=False, slots=True)
class _Occupancy:
    """A group in a range of the arena, from one op to another; times count the ops of the pass."""

    group: int
    low: int
    high: int
    begin: int = -1
    end: int = -1
    arrives: int | None = None
    """The op that brings it; None: it is there at the start."""
    leaves: int | None = None
    """The op that gives it back; None: it is there at the end."""
    used: bool = False
    """An update changes it."""


@dataclass(eq=False, slots=True)
class _Detour:
    """Two ops on one group that a settling pass may do without: a way in and out, or out and in again."""

    group: int
    ops: tuple[int, int]
    place: _Occupancy | None = None
    """The range in which the group would stay in between, if it is to."""
    changed: bool = False
    """An update has changed it before, in the same pass, and the first op copies it to the host."""
    visit: _Occupancy | None = None
    """The occupancy that the detour would save."""


class _Detours:
    """Ops of a pass that its updates do not need."""

    def __init__(self, ops: Sequence[Op], groups: Sequence[TensorGroup], initial: Sequence[InitialCopy]) -> None:
        self._ops, self._groups = ops, groups
        self._on_host = {t for op in ops if op.updates_on_host for g in op.groups for t in groups[g].tensors}
        self._copies = {op.id for op in ops if op.kind == "offload"}
        self._occupancies = list(self._walk(initial))

    def unneeded(self) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Return the ops that can be done without, and those after which a group stays on the device, with the groups.

        What stays is copied to the host there: an update has changed it, and other passes may drop it.
        """
        detours = list(self._detours())
        # What is done without takes no place, so that one decides about others.
        while True:
            gone = {id(detour.visit) for detour in detours}
            occupancies = [stay for stay in self._occupancies if id(stay) not in gone]
            kept = [detour for detour in detours if detour.place is None or not _taken(detour.place, occupancies)]
            if len(kept) == len(detours):
                break
            detours = kept
        staying = {(detour.ops[0], detour.group) for detour in detours if detour.changed}
        spared = {(op, detour.group) for detour in detours for op in detour.ops} | self._idle_copies()
        return spared - staying, staying

    def _detours(self) -> Iterator[_Detour]:
        of_group: dict[int, list[_Occupancy]] = defaultdict(list)
        for stay in self._occupancies:
            of_group[stay.group].append(stay)
        for group, stays in of_group.items():
            if stays[0].arrives is None:
                if not self._on_host.isdisjoint(self._groups[group].tensors):
                    continue  # it comes back as the host has updated it
                for one, other in zip(stays, stays[1:], strict=False):
                    if one.leaves is not None and other.arrives is not None and one.low == other.low:
                        place = _Occupancy(group, one.low, one.high, one.end, other.begin)
                        yield _Detour(
                            group,
                            (one.leaves, other.arrives),
                            place=place,
                            changed=one.used and one.leaves in self._copies,
                        )
                continue
            for stay in stays:
                if not stay.used and stay.arrives is not None and stay.leaves is not None:
                    yield _Detour(group, (stay.arrives, stay.leaves), visit=stay)

    def _idle_copies(self) -> set[tuple[int, int]]:
        """Return copies of weights to the host before any update of them, which give no range back."""
        updated: set[int] = set()
        idle: set[tuple[int, int]] = set()
        for op in self._ops:
            if op.kind == "update" and op.lane != "host":
                updated.update(op.groups)
            elif op.kind == "offload" and op.payload == "weight" and op.release_after is None:
                idle.update((op.id, group) for group in op.groups if group not in updated)
        return idle

    def _walk(self, initial: Sequence[InitialCopy]) -> Iterator[_Occupancy]:
        """Yield the range and the time of every stay of a group."""
        live = {copy.group: self._occupy(copy.group, copy.offset, -1, None) for copy in initial}
        leaving: dict[int, list[tuple[int, int]]] = defaultdict(list)
        step = 0
        for now, op in enumerate(self._ops):
            # Memory of a step's offloads is free at its end: copies of the next step may arrive in these ranges.
            for done in sorted(at for at in leaving if at < op.step) if op.step != step else ():
                for group, leaves in leaving.pop(done):
                    yield _ended(live.pop(group), now, leaves)
            step = op.step
            if op.kind == "update":
                if op.lane != "host":
                    self._use(op, live)
            elif takes_room(op):
                for group, offset in zip(op.groups, op.offsets, strict=True):
                    live[group] = self._occupy(group, offset, now, op.id)
            elif op.kind == "drop":
                for group in op.groups:
                    yield _ended(live.pop(group), now, op.id)
            elif op.release_after is not None:
                leaving[op.release_after] += [(group, op.id) for group in op.groups]
        for group, leaves in (pair for pairs in leaving.values() for pair in pairs):
            yield _ended(live.pop(group), len(self._ops), leaves)
        for stay in live.values():
            yield _ended(stay, len(self._ops), None)

    def _use(self, op: Op, live: dict[int, _Occupancy]) -> None:
        tensors = {t for group in op.groups for t in self._groups[group].tensors}
        for stay in live.values():
            stay.used = stay.used or not tensors.isdisjoint(self._groups[stay.group].tensors)

    def _occupy(self, group: int, offset: int, begin: int, arrives: int | None) -> _Occupancy:
        return _Occupancy(group, offset, offset + self._groups[group].bytes, begin, arrives=arrives)


def _ended(stay: _Occupancy, end: int, leaves: int | None) -> _Occupancy:
    stay.end, stay.leaves = end, leaves
    return stay


def _taken(place: _Occupancy, stays: Sequence[_Occupancy]) -> bool:
    """Return whether another group is in ``place`` at its time."""
    return any(
        stay.group != place.group
        and stay.low < place.high
        and place.low < stay.high
        and stay.begin < place.end
        and place.begin < stay.end
        for stay in stays
    )
