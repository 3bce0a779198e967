"""Lets gradients that are copied to the host share memory there.

The gradients of one op, a group, have a place, their *slot*, from the beginning of their copy to the end of the update
that reads them, as simulated with updates that are somewhat slower than expected. Two ops may share addresses if
neither's copy begins while the other has its place. Whether updates are in time for that is a matter of speed only:
every copy waits for the updates that read what it overwrites, however late they are. As they stand before it, that is
no deadlock.

Lifetimes are counted in copies: the one that begins when the ``k``-th copy does ends before another one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lt_offload.plan.assembly.link import last_occupants
from lt_offload.plan.assembly.placement import Lifetime, Placement, place
from lt_offload.plan.iteration.durations import slowed
from lt_offload.plan.iteration.memory import host_bytes
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace

_SLOWER = 1.1
"""Updates on the host may last this much longer than expected before copies wait for them."""
TOLERATED = 1.001
"""Time of an iteration with shared memory, relative to that without, up to which less memory is preferred to more."""
_SHORTER = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0)
"""Parts of the simulated lifetimes that are tried where RAM is short; then copies do wait for updates."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Gradients that travel together."""

    op: Op
    updates: tuple[int, ...]
    """The ops that read them."""
    bytes: int


def share_slots(plan: Plan, profile: Profile, trace: Trace) -> tuple[Plan, Trace]:
    """Return ``plan`` with slots that are shared, and with what copies wait for because of that; simulated.

    As far as its host budget allows, no copy waits longer than before.

    Args:
        plan: each of its gradients has a slot of its own. Its host budget is at least that of
            :func:`lt_offload.plan.iteration.memory.least_host_bytes`.
        profile: what it was made for.
        trace: ``plan``, simulated.
    """
    arrivals = _arrivals(plan)
    if not arrivals:
        return plan, trace
    profile = profile.with_host_threads(plan.host_threads)
    # All that is on the host but these gradients stays where it is.
    room = plan.host_budget_bytes - (host_bytes(plan, profile) - plan.gradient_bytes)
    best: tuple[Plan, Trace] | None = None
    for ends in _ends(plan, profile, trace, arrivals):
        placement = _place(arrivals, ends)
        if placement.extent > room:
            continue
        shared = _with_slots(plan, arrivals, placement)
        simulated = simulate(shared, profile)
        if best is None or simulated.iteration_time < best[1].iteration_time:
            best = shared, simulated
        if best[1].iteration_time <= TOLERATED * trace.iteration_time:
            break
    assert best is not None, f"gradients need {placement.extent} bytes of RAM, there are {room}"
    return best


def _place(arrivals: Sequence[_Arrival], ends: Sequence[int]) -> Placement:
    count = len(arrivals)
    lives = enumerate(zip(arrivals, ends, strict=True))
    return place([Lifetime(arrival.bytes, at, end % count) for at, (arrival, end) in lives], count)


def _with_slots(plan: Plan, arrivals: Sequence[_Arrival], placement: Placement) -> Plan:
    ops, groups = list(plan.ops), list(plan.groups)
    for position, (arrival, slot) in enumerate(zip(arrivals, placement.offsets, strict=True)):
        waits = _former_updates(position, arrivals, placement.offsets)
        (group,) = arrival.op.groups
        groups[group] = replace(groups[group], host_offset=slot)
        ops[arrival.op.id] = replace(arrival.op, after=tuple(sorted({*arrival.op.after, *waits})))
    return replace(plan, ops=tuple(ops), groups=tuple(groups), gradient_bytes=placement.extent)


def _arrivals(plan: Plan) -> list[_Arrival]:
    updates = {t: op.id for op in plan.ops if op.updates_on_host for t in plan.tensors(op)}
    return [
        _Arrival(op, tuple(sorted({updates[t] for t in plan.tensors(op)})), plan.groups[op.groups[0]].bytes)
        for op in plan.ops
        if op.sends_gradients
    ]


def _ends(plan: Plan, profile: Profile, trace: Trace, arrivals: Sequence[_Arrival]) -> Iterator[list[int]]:
    """Yield ways to end lifetimes, the best first, each as positions of copies, counted on into the next iteration.

    An op keeps its place at least until the last copy of its step has begun: updates stand after all of those.
    """
    # Of the copies of one step the last one wins in the mapping.
    last = {arrival.op.step: at for at, arrival in enumerate(arrivals)}
    least = [last[arrival.op.step] for arrival in arrivals]
    simulated = _latest(least, _simulated_ends(trace, arrivals))
    slower = _latest(least, _simulated_ends(simulate(plan, slowed(profile, host=_SLOWER)), arrivals))
    yield slower
    # Which updates have to wait until the others are done may be another choice there, which does not suit here.
    yield _latest(simulated, slower)
    yield simulated
    for part in _SHORTER:
        yield [first + int(part * (end - first)) for first, end in zip(least, simulated, strict=True)]


def _latest(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


def _simulated_ends(trace: Trace, arrivals: Sequence[_Arrival]) -> list[int]:
    """Return, per arrival, the last copy that begins before it has been used."""
    spans = {span.op: span for span in trace.spans}
    starts = [spans[arrival.op.id].start for arrival in arrivals]
    # Beginnings are listed twice: an update may end after copies of the next iteration have begun.
    begins = [*starts, *(start + trace.iteration_time for start in starts)]
    ends = []
    for at, arrival in enumerate(arrivals):
        done = max(spans[update].end for update in arrival.updates)
        following = range(at + 1, at + len(arrivals))
        ends.append(max((i for i in following if begins[i] < done), default=at))
    return ends


def _former_updates(at: int, arrivals: Sequence[_Arrival], slots: Sequence[int]) -> set[int]:
    """Return the updates that read what was last at the addresses of an arrival; earlier ones were awaited by them."""
    # The walk is backwards in time: gradients that were there before the last ones were awaited by the copy of these.
    before = ((at - ago) % len(arrivals) for ago in range(1, len(arrivals)))
    formers = ((slots[other], slots[other] + arrivals[other].bytes, arrivals[other].updates) for other in before)
    return set().union(*last_occupants(slots[at], slots[at] + arrivals[at].bytes, formers))
