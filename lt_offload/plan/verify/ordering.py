"""A walk through a few passes of a plan that checks every access: residency, currency, order.

Order is judged by vector clocks: an op knows how far each lane has come when it starts, from the op before it on its
own lane and from its ``after``. The host takes updates in an order of its own, so of that lane an op knows a set of
updates instead. Two accesses to one buffer, at least one of them a write, must be ordered that way.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field, replace

from lt_offload.plan.iteration.memory import aligned, state_room
from lt_offload.schema.accesses import IN_ARENA, accesses, takes_room
from lt_offload.schema.lanes import LANES, TierName
from lt_offload.schema.plan import Op, Pass, Plan, describe
from lt_offload.schema.profile import Profile

_LANES = {lane.name: index for index, lane in enumerate(LANES)}
_Clock = tuple[int, ...]
"""By lane: how many of its ops have ended; of a lane without order, which ones, as a set of bits."""
_IN_ORDER = tuple(lane.in_order for lane in LANES)
_START: _Clock = (0,) * len(LANES)
_Key = tuple[str, int]
_ORDERS: dict[tuple[bool, int], tuple[int, ...]] = {
    (False, 1): (0, 0),
    (False, 3): (2, 0, 0, 1, 0, 2, 2, 0, 1, 1, 2),
    (True, 3): (0, 2, 0, 0, 1, 0, 1, 1, 2, 0),
}
"""By whether updates wait, and by the number of kinds of passes: every kind after every other that it may follow. What
settles only follows what adds up, and what begins sums follows everything: sums may be cleared."""


def misordered(plan: Plan, profile: Profile) -> list[str]:
    """Return the violations of residency and order that a walk through ``plan`` meets."""
    walk = _Ordering(plan, profile)
    for number in _ORDERS[plan.delayed, len(plan.passes)]:
        walk.iteration(plan.passes[number])
    # Every pass meets the same mistakes again.
    return list(dict.fromkeys(walk.violations))


@dataclass(frozen=True, slots=True)
class _OpAccess:
    op: Op
    lane: int
    count: int
    """Its position on its lane, in the order of issue."""


@dataclass(slots=True)
class _WatchedCell:
    """A buffer or a host copy, with the accesses that later ones have to be ordered after."""

    write: _OpAccess | None = None
    reads: dict[int, _OpAccess] = field(default_factory=dict)

    def accesses(self) -> list[_OpAccess]:
        return [*([self.write] if self.write else []), *self.reads.values()]


@dataclass(slots=True)
class _DeviceRange:
    """A device copy in the arena."""

    key: _Key
    low: int
    high: int
    cell: _WatchedCell
    outdated: bool = False
    """The host has updated the tensor since."""
    newer: bool = False
    """It is newer than the host copy."""


@dataclass(frozen=True, slots=True)
class _UsedRange:
    """A range of the arena that was used before, or of the host memory of gradients."""

    low: int
    high: int
    accesses: tuple[_OpAccess, ...]
    """The accesses that its next writer has to be ordered after; of gradients, the copy that brought them."""


def _displaced(ranges: list[_UsedRange], low: int, high: int) -> list[_UsedRange]:
    """Take the addresses from ``low`` to ``high`` out of ``ranges``; return those that had some of them."""
    displaced, kept = [], []
    for former in ranges:
        if former.low >= high or former.high <= low:
            kept.append(former)
            continue
        displaced.append(former)
        rest = (replace(former, high=low), replace(former, low=high))
        kept += [part for part in rest if part.low < part.high]
    ranges[:] = kept
    return displaced


class _Ordering:
    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        self.violations: list[str] = []
        self.of_block: list[list[int]] = [[] for _ in profile.blocks]
        for index, tensor in enumerate(profile.tensors):
            for block in tensor.blocks:
                self.of_block[block].append(index)
        self.in_rows = {t for op in plan.ops if op.rows == "looked up" for t in plan.tensors(op)}
        """Tables whose first block's gradient is sent as rows."""
        self.ended: list[_Clock] = [_START] * len(plan.ops)
        """By op: when its latest issue ends."""
        self.lanes: list[_Clock] = [_START] * len(LANES)
        """By lane: when its latest op ends."""
        self.issued = [0] * len(LANES)
        """By lane: its ops so far."""
        self.cells: dict[tuple[str, str, int], _WatchedCell] = defaultdict(_WatchedCell)
        self.outdated_hosts: set[_Key] = set()
        self.live: dict[_Key, _DeviceRange] = {}
        self.order: list[int] = []
        """Offsets of live buffers, ascending."""
        self.at: dict[int, _DeviceRange] = {}
        self.freed: list[_UsedRange] = []
        self.releases: dict[int, list[_Key]] = defaultdict(list)
        self.held: dict[int, list[_OpAccess]] = defaultdict(list)
        self.given_back: list[_OpAccess] = []
        self.arrived: list[_UsedRange] = []
        self.computed: _OpAccess | None = None
        self.places: dict[int, int] = {}
        """Offset to which the present op brings each tensor."""
        self.wanted: dict[_Key, int] = {}
        """Offset of each copy that is on the device at the start of an iteration."""
        for entry in plan.initial:
            group = plan.groups[entry.group]
            for t, offset in group.offsets(entry.offset):
                key = (group.payload, t)
                if key in self.live:
                    self.violations.append(f"initial: {self._what(key)} is there twice")
                    continue
                self.wanted[key] = offset
                self._place(key, offset, f"initial {self._what(key)}")

    def iteration(self, which: Pass) -> None:
        step = 0
        for op in self.plan.program(which):
            if op.step != step:
                self._end_step(step)
                step = op.step
            self._walk(op)
        self._end_step(step)
        offsets: dict[_Key, int] = {key: buffer.low for key, buffer in self.live.items()}
        wanted = self.wanted
        for key in sorted(offsets.keys() | wanted.keys()):
            if offsets.get(key) != wanted.get(key):
                self.violations.append(
                    f"cyclic residency: {self._what(key)} begins the iteration at {wanted.get(key)} and ends it at "
                    f"{offsets.get(key)}"
                )

    def _walk(self, op: Op) -> None:
        clock = _START
        for ended in {self.ended[other] for other in op.after}:
            clock = _merge(clock, ended)
        lane = _LANES.get(op.lane)
        if lane is None:
            # A drop occupies no lane: it is over as soon as all that it waits for is.
            self.ended[op.id] = clock
            for t in self.plan.tensors(op):
                self._drop(op, (op.payload or "", t))
            return
        in_order = _IN_ORDER[lane]
        if in_order:
            clock = _merge(clock, self.lanes[lane])
        self.issued[lane] += 1
        access = _OpAccess(op, lane, self.issued[lane])
        if op.computes:
            self._take_memory(access, clock)
        for group in (self.plan.groups[number] for number in op.groups):
            if group.host_offset is not None:
                self._arrive(access, clock, group.host_offset, group.host_offset + group.bytes)
        placed = zip(op.groups, op.offsets, strict=False)
        self.places = dict(pair for group, start in placed for pair in self.plan.groups[group].offsets(start))
        begins = self.plan.begins_sums(op)
        for what in accesses(op):
            payload = "sum" if begins and what.tier == "host" else what.payload
            for key in self._keys(op, payload):
                if what.how == "reads":
                    self._reads(access, clock, self._tier(op, what.tier, key), key)
                else:
                    self._writes(access, clock, what.tier, key, used_up=what.how == "uses up")
        # Two pools, two ways to wait: a range of the arena has a next owner that is known, framework memory goes to
        # whoever comes.
        if op.release_after is not None and op.payload in IN_ARENA:
            self.releases[op.release_after] += [key for key in self._keys(op, op.payload or "") if key in self.live]
        elif op.release_after is not None:
            self.held[op.release_after].append(access)
        last = access.count if in_order else clock[lane] | 1 << access.count
        self.ended[op.id] = clock[:lane] + (last,) + clock[lane + 1 :]
        if in_order:
            self.lanes[lane] = self.ended[op.id]

    # -- ops -------------------------------------------------------------------------------------------------------

    def _keys(self, op: Op, payload: str) -> list[_Key]:
        """Return the weights, states, ... of a kind that ``op`` uses: its block's, or those of its tensors."""
        tensors = self.profile.tensors
        if op.computes:
            if op.kind == "backward" and not self.profile.blocks[op.block].has_backward:
                return []
            own = self.of_block[op.block]
            used = [t for t in own if tensors[t].trainable] if payload == "grad" else own
            if payload == "grad":
                return [self._grad(t, op.block == tensors[t].blocks[0]) for t in used]
        else:
            used = list(self.plan.tensors(op))
        if payload == "activation":
            return [(payload, op.block)]
        if op.kind == "update":
            absent = {"grad": self.plan.delayed, "sum": not self.plan.adds_up}
            used = [t for t in used if not absent.get(payload) and (payload != "state" or tensors[t].state_bytes)]
        if payload == "grad":
            return [self._grad(t, op.rows == "looked up") for t in used]
        return [(payload, t) for t in used]

    def _grad(self, tensor: int, rows: bool) -> _Key:
        """Return the gradient of ``tensor``, or the first block's if that is apart and ``rows`` are meant."""
        return ("rows" if rows and tensor in self.in_rows else "grad", tensor)

    def _tier(self, op: Op, tier: TierName, key: _Key) -> TierName:
        """Return the tier in which ``op`` reads ``key``: computations read some weights directly."""
        return "host" if op.zero_copy and key[0] == "weight" and key[1] in self.plan.zero_copy(op) else tier

    def _take_memory(self, access: _OpAccess, clock: _Clock) -> None:
        """Let a computation allocate, from memory that has been given back by then."""
        for held in self.given_back:
            self._require(access, clock, held, "memory that it may take")
        # Later computations are behind this one on their lane, and have waited with it.
        self.given_back.clear()
        self.computed = access

    def _reads(self, access: _OpAccess, clock: _Clock, tier: TierName, key: _Key) -> None:
        op = access.op
        if tier == "host":
            if key in self.outdated_hosts:
                rule = "zero_copy: the host copy" if op.zero_copy else "host copy: the one"
                self._report(op, f"{rule} of {self._what(key)} is outdated")
        elif key[0] in IN_ARENA:
            buffer = self._on_device(op, key)
            if buffer is not None:
                if buffer.outdated:
                    self._report(op, f"residency: its {self._what(key)} is from before the host's update")
                self._read(access, clock, buffer.cell, key)
            return
        self._read(access, clock, self.cells[tier, key[0], key[1]], key)

    def _writes(self, access: _OpAccess, clock: _Clock, tier: TierName, key: _Key, *, used_up: bool) -> None:
        op = access.op
        if takes_room(op):
            self._bring(access, clock, key)
        elif tier == "host":
            self._write(access, clock, self.cells["host", key[0], key[1]], key)
            buffer = self.live.get(key)
            # Two ways to write to the host: a copy makes both alike, an update there leaves the device with the old
            # value.
            if buffer is not None and op.kind == "offload":
                buffer.newer = False
            elif buffer is not None:
                buffer.outdated = True
            self.outdated_hosts.discard(key)
        elif key[0] in IN_ARENA:
            buffer = self._on_device(op, key)
            if buffer is not None:
                self._write(access, clock, buffer.cell, key)
                # A sum that an update has used up is worth nothing on either side, so no copy of it can be outdated.
                buffer.newer = not used_up
                (self.outdated_hosts.discard if used_up else self.outdated_hosts.add)(key)
        else:
            if op.kind == "prefetch":  # it takes memory of the framework
                for held in [*self.given_back, *([self.computed] if self.computed else [])]:
                    self._require(access, clock, held, "memory that it may take")
            self._write(access, clock, self.cells[tier, key[0], key[1]], key)

    def _bring(self, access: _OpAccess, clock: _Clock, key: _Key) -> None:
        op = access.op
        if key in self.live:
            self._report(op, f"residency: {self._what(key)} is on the device already")
            return
        buffer = self._place(key, self.places[key[1]], describe(op))
        for former in _displaced(self.freed, buffer.low, buffer.high):
            for other in former.accesses:
                self._require(access, clock, other, f"the arena range of {self._what(key)}")
        buffer.cell.write = access

    def _arrive(self, access: _OpAccess, clock: _Clock, low: int, high: int) -> None:
        """Take a range of the host memory of gradients; earlier gradients there must have been read."""
        for former in (arrival.op for one in _displaced(self.arrived, low, high) for arrival in one.accesses):
            for t in self.plan.tensors(former):
                what = self._grad(t, former.rows == "looked up")
                cell = self.cells["host", what[0], t]
                for other in cell.accesses():
                    self._require(access, clock, other, self._what(what))
                # Each write forgets the reads before it: no read since means that no update has had this gradient.
                if not cell.reads:
                    self._report(access.op, f"host_offset: it overwrites {self._what(what)}, which no update has read")
        self.arrived.append(_UsedRange(low, high, (access,)))

    def _drop(self, op: Op, key: _Key) -> None:
        buffer = self._on_device(op, key)
        if buffer is None:
            return
        if buffer.newer:
            self._report(op, f"host copy: {self._what(key)} would be lost, the host's is outdated")
        self._release(key)

    def _end_step(self, step: int) -> None:
        for key in self.releases.pop(step, ()):
            if key in self.live:
                if self.live[key].newer:
                    self.violations.append(f"step {step}: host copy: {self._what(key)} would be lost")
                self._release(key)
        self.given_back += self.held.pop(step, ())

    # -- arena -----------------------------------------------------------------------------------------------------

    def _place(self, key: _Key, offset: int, name: str) -> _DeviceRange:
        tensor = self.profile.tensors[key[1]]
        size = state_room(tensor.state_bytes) if key[0] == "state" else aligned(tensor.bytes)
        buffer = _DeviceRange(key, offset, offset + size, _WatchedCell())
        if buffer.high > self.plan.arena_bytes:
            self.violations.append(
                f"{name}: arena: {self._what(key)} ends at {buffer.high}, the extent is {self.plan.arena_bytes}"
            )
        at = bisect.bisect_left(self.order, buffer.low)
        # Those that were placed do not overlap in a sound plan, so only the two neighbours can overlap this one.
        for neighbour in self.order[max(at - 1, 0) : at + 1]:
            other = self.at[neighbour]
            if other.low < buffer.high and other.high > buffer.low:
                self.violations.append(
                    f"{name}: arena: {self._what(key)} at [{buffer.low}, {buffer.high}) overlaps "
                    f"{self._what(other.key)} at [{other.low}, {other.high})"
                )
        if buffer.low not in self.at:
            self.order.insert(at, buffer.low)
        self.at[buffer.low] = buffer
        self.live[key] = buffer
        return buffer

    def _release(self, key: _Key) -> None:
        buffer = self.live.pop(key)
        # After an overlap that has been reported, another one may be at this offset.
        if self.at.get(buffer.low) is buffer:
            del self.at[buffer.low]
            del self.order[bisect.bisect_left(self.order, buffer.low)]
        accesses = buffer.cell.accesses()
        if accesses:
            self.freed.append(_UsedRange(buffer.low, buffer.high, tuple(accesses)))

    # -- accesses --------------------------------------------------------------------------------------------------

    def _on_device(self, op: Op, key: _Key) -> _DeviceRange | None:
        if key not in self.live:
            self._report(op, f"residency: {self._what(key)} is not on the device")
        return self.live.get(key)

    def _read(self, access: _OpAccess, clock: _Clock, cell: _WatchedCell, key: _Key) -> None:
        if cell.write is not None:
            self._require(access, clock, cell.write, self._what(key))
        cell.reads[access.lane] = access

    def _write(self, access: _OpAccess, clock: _Clock, cell: _WatchedCell, key: _Key) -> None:
        for other in cell.accesses():
            self._require(access, clock, other, self._what(key))
        cell.write = access
        cell.reads.clear()

    def _require(self, access: _OpAccess, clock: _Clock, other: _OpAccess, what: str) -> None:
        ended = clock[other.lane]
        # Of a lane in order the count tells all before it; of the host's, which chooses, each update has a bit.
        known = ended >= other.count if _IN_ORDER[other.lane] else ended >> other.count & 1
        if not known:
            self._report(access.op, f"after: it is not ordered after {describe(other.op)}, which uses {what}")

    def _report(self, op: Op, rule: str) -> None:
        self.violations.append(f"{describe(op)}: {rule}")

    def _what(self, key: _Key) -> str:
        if key[0] == "activation":
            return f"activations of {self.profile.blocks[key[1]].name}"
        if key[0] == "rows":
            return f"gradients of rows of {self.profile.tensors[key[1]].name}"
        if key[0] == "sum":
            return f"the sum of gradients of {self.profile.tensors[key[1]].name}"
        return f"{key[0]} {self.profile.tensors[key[1]].name}"


def _merge(a: _Clock, b: _Clock) -> _Clock:
    return tuple([(x if x > y else y) if kept else x | y for x, y, kept in zip(a, b, _IN_ORDER, strict=True)])
