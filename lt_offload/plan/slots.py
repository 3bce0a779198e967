"""Lets gradients that are copied to the host share memory there. Knows a simulated plan; changes no decision.

The gradients of one op have a place, their *slot*, from the beginning of their copy to the end of the update that reads
them, as simulated, and somewhat longer. Two ops may share addresses if neither's copy begins while the other has its
place. Which op is in time for that is a matter of speed only: every copy waits for the updates that read what it
overwrites, however late they are. As updates that a copy waits for stand before it, that is no deadlock.

Lifetimes are counted in copies: the one that begins when the ``k``-th copy does ends before another one begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lt_offload.plan.arena import Lifetime, aligned, place
from lt_offload.plan.link import without
from lt_offload.plan.schedule import Op, Plan
from lt_offload.plan.trace import Trace
from lt_offload.profile.types import Profile

_LATE = 2.0
"""Longest updates or copies by which an update may end later than simulated before a copy waits for it."""
_SHORTER = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0)
"""Parts of the simulated lifetimes that are tried where RAM is short; then copies do wait for updates."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Gradients that travel together."""

    op: Op
    updates: tuple[int, ...]
    """The ops that read them."""
    bytes: int


def slot_bytes(op: Op, profile: Profile) -> int:
    """Return the bytes of the slot of ``op``, which copies gradients to the host."""
    return sum(aligned(profile.tensors[t].bytes) for t in op.tensors)


def own_slots(ops: Sequence[Op], profile: Profile) -> tuple[tuple[Op, ...], int]:
    """Return ``ops`` with a slot of its own for each that copies gradients to the host, and the extent of all slots."""
    found, extent = [], 0
    for op in ops:
        if op.payload == "grad" and op.resource == "d2h":
            found.append(replace(op, slot=extent))
            extent += slot_bytes(op, profile)
        else:
            found.append(op)
    return tuple(found), extent


def share_slots(plan: Plan, profile: Profile, trace: Trace, room: int) -> Plan:
    """Return ``plan`` with slots that are shared within ``room`` bytes, and with what copies wait for because of that.

    Args:
        plan: each of its gradients has a slot of its own.
        profile: what it was made for.
        trace: ``plan``, simulated.
        room: at least the most that arrives in one step; see :func:`lt_offload.plan.memory.least_host_bytes`.
    """
    arrivals = _arrivals(plan, profile)
    if not arrivals:
        return plan
    count = len(arrivals)
    for ends in _ends(arrivals, trace):
        lifetimes = [Lifetime(a.bytes, at, end % count) for at, (a, end) in enumerate(zip(arrivals, ends, strict=True))]
        placement = place(lifetimes, count)
        if placement.extent <= room:
            break
    else:
        raise AssertionError(f"gradients need {placement.extent} bytes of RAM, there are {room}")
    ops = list(plan.ops)
    for at, slot in enumerate(placement.offsets):
        op, waits = arrivals[at].op, _former_updates(at, arrivals, placement.offsets)
        ops[op.id] = replace(op, slot=slot, after=tuple(sorted({*op.after, *waits})))
    return replace(plan, ops=tuple(ops), gradient_bytes=placement.extent)


def _arrivals(plan: Plan, profile: Profile) -> list[_Arrival]:
    updates = {t: op.id for op in plan.ops if op.kind == "update" and op.resource == "host" for t in op.tensors}
    return [
        _Arrival(op, tuple(sorted({updates[t] for t in op.tensors})), slot_bytes(op, profile))
        for op in plan.ops
        if op.slot is not None
    ]


def _ends(arrivals: Sequence[_Arrival], trace: Trace) -> Iterator[list[int]]:
    """Yield ways to end lifetimes, the longest first, each as positions of copies, counted on into the next iteration.

    An op keeps its place at least until the last copy of its step has begun: updates stand after all of those.
    """
    count = len(arrivals)
    spans = {span.op: span for span in trace.spans}
    starts = [spans[a.op.id].start for a in arrivals]
    late = _LATE * max(spans[op].end - spans[op].start for a in arrivals for op in (a.op.id, *a.updates))
    begins = [*starts, *(start + trace.iteration_time for start in starts)]
    shortest, simulated, longest = [], [], []
    for at, arrival in enumerate(arrivals):
        following = range(at + 1, at + count)
        together = itertools.takewhile(lambda i, a=arrival: i < count and arrivals[i].op.step == a.op.step, following)
        shortest.append(max(together, default=at))
        done = max(spans[update].end for update in arrival.updates)
        for ends, until in ((simulated, done), (longest, done + late)):
            ends.append(max((i for i in following if begins[i] < until), default=at))
    for part in (1.0, 0.5, 0.0):
        yield [max(a, b + round(part * (c - b))) for a, b, c in zip(shortest, simulated, longest, strict=True)]
    for part in _SHORTER:
        yield [max(a, at + int(part * (b - at))) for at, (a, b) in enumerate(zip(shortest, simulated, strict=True))]


def _former_updates(at: int, arrivals: Sequence[_Arrival], slots: Sequence[int]) -> set[int]:
    """Return the updates that read what was last at the addresses of an arrival; earlier ones were awaited by them."""
    open_ranges = [(slots[at], slots[at] + arrivals[at].bytes)]
    found: set[int] = set()
    for ago in range(1, len(arrivals)):
        other = (at - ago) % len(arrivals)
        left = without(open_ranges, slots[other], slots[other] + arrivals[other].bytes)
        if left != open_ranges:
            open_ranges = left
            found.update(arrivals[other].updates)
        if not open_ranges:
            break
    return found
