"""Runs a plan on paper: four lanes that work through their ops in order, and a thread that issues them.

An op starts when its lane is free, everything in ``after`` has ended, and the issuing thread has come to it. The
thread waits for nothing; each computation costs it the block's launch time. The host takes the most urgent update of
those that may start. Several iterations are unrolled, the last ones are reported.

What computations read in host memory shares the link with the copies to the device, see
:mod:`lt_offload.plan.verify.traffic`; such a computation lasts at least as long as the link needs. Gradients that a
backward writes to host memory cross the link from its begin on: the computation is not done before they have, and
copies to the host that are queued later wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt_offload.errors import PlanError
from lt_offload.plan.iteration.memory import computation_bytes, host_bytes
from lt_offload.plan.verify.traffic import Traffic
from lt_offload.schema.plan import Op, Plan, deadlines
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Span, Trace

_WARM_UP = 2
_MEASURED = 2


def simulate(plan: Plan, profile: Profile) -> Trace:
    """Return the iteration that ``plan`` would do in the steady state on the machine of ``profile``.

    Raises:
        PlanError: if an op waits for something that cannot have happened before.
    """
    _require_progress(plan)
    launch = [
        profile.blocks[op.block].launch_s if op.kind == "forward" or _runs(op, profile) else 0.0 for op in plan.ops
    ]
    lanes = _SimulatedLanes(profile)
    host = _Host(plan)
    before, end = [0.0] * len(plan.ops), [0.0] * len(plan.ops)
    thread = 0.0
    finished = [0.0]
    start: list[float] = []
    for iteration in range(_WARM_UP + _MEASURED):
        start = [0.0] * len(plan.ops)
        for op, cost in zip(plan.ops, launch, strict=True):
            ready = thread
            for other in op.after:
                if other in host.waiting:
                    host.run(other)
                ready = max(ready, (end if other < op.id else before)[other])
            thread += cost
            if op.lane == "host":
                host.give(op, ready, iteration, start, end)
                continue
            # The last kernel of a computation cannot run before it has been launched.
            lanes.run(op, ready, thread if cost else 0.0, start, end)
        finished.append(lanes.computed)
        before, end = end, [0.0] * len(plan.ops)
    while host.waiting:
        host.run(next(iter(host.waiting)))
    return _trace(plan, profile, start, before, finished)


class _SimulatedLanes:
    """The lanes of the device: computations and copies."""

    def __init__(self, profile: Profile) -> None:
        self.hardware = profile.hardware
        self.computed = 0.0
        """When the last computation ends."""
        self.began = 0.0
        """When the last forward or backward began."""
        self.sent = 0.0
        """When the last copy to the host ends."""
        self.to_device = Traffic()

    def run(self, op: Op, ready: float, launched: float, start: list[float], end: list[float]) -> None:
        """Note when ``op`` starts and ends."""
        if op.lane == "h2d":
            self.to_device.copy(op.id, ready, op.seconds, start, end)
        elif op.lane == "d2h":
            start[op.id] = max(ready, self.sent)
            self.sent = end[op.id] = start[op.id] + op.seconds
        elif op.lane == "compute":
            start[op.id] = begin = max(ready, self.computed)
            self.computed = end[op.id] = max(begin + op.seconds, launched, self._direct(op, begin))
        else:
            start[op.id] = end[op.id] = ready

    def _direct(self, op: Op, begin: float) -> float:
        """Return when the link has carried what the computation reads or writes in host memory."""
        if op.kind in ("forward", "backward"):
            self.began = begin
            if not op.bytes:
                return begin
            seconds = op.bytes / self.hardware.h2d_bytes_per_s
            self.to_device.read(begin, seconds)
            return begin + seconds
        if not op.bytes:
            return begin
        seconds = op.bytes / self.hardware.d2h_bytes_per_s
        self.sent = max(self.sent, self.began) + seconds
        return self.began + seconds


@dataclass(slots=True)
class _Update:
    """An update that the host has been given and not begun."""

    op: Op
    ready: float
    urgency: int
    start: list[float]
    """Where to note when it starts and, below, ends: the times of its iteration's ops."""
    end: list[float]


class _Host:
    """The host lane, run only as far as somebody waits for it: until then more urgent updates may arrive."""

    def __init__(self, plan: Plan) -> None:
        self.ops = len(plan.ops)
        self.deadlines = deadlines(plan.ops)
        self.free = 0.0
        self.waiting: dict[int, _Update] = {}
        """By op."""

    def give(self, op: Op, ready: float, iteration: int, start: list[float], end: list[float]) -> None:
        """Queue ``op``; the one of the iteration before, if nobody has waited for it, is run first."""
        while op.id in self.waiting:
            self._next()
        urgency = iteration * self.ops + self.deadlines.get(op.id, 2 * self.ops)
        self.waiting[op.id] = _Update(op, ready, urgency, start, end)

    def run(self, op: int) -> None:
        """Go on until ``op`` has been done."""
        while op in self.waiting:
            self._next()

    def _next(self) -> None:
        here = [update for update in self.waiting.values() if update.ready <= self.free]
        if here:
            update = min(here, key=lambda update: update.urgency)
        else:
            update = min(self.waiting.values(), key=lambda update: (update.ready, update.urgency))
        del self.waiting[update.op.id]
        begin = max(self.free, update.ready)
        update.start[update.op.id] = begin
        update.end[update.op.id] = self.free = begin + update.op.seconds


def _runs(op: Op, profile: Profile) -> bool:
    return op.kind == "backward" and profile.blocks[op.block].has_backward


def _trace(plan: Plan, profile: Profile, start: list[float], end: list[float], finished: list[float]) -> Trace:
    memory = computation_bytes(plan, profile)
    origin = min(start)
    computations = [op for op in plan.ops if op.kind in ("forward", "backward")]
    return Trace(
        source="simulated",
        iteration_time=(finished[-1] - finished[-1 - _MEASURED]) / _MEASURED,
        device_peak=int(memory.max()),
        host_peak=host_bytes(plan, profile),
        budget_bytes=plan.budget_bytes,
        spans=tuple(
            Span(op=op.id, lane=op.lane, label=label(op), start=start[op.id] - origin, end=end[op.id] - origin)
            for op in plan.ops
            if op.lane != "none"
        ),
        memory=tuple(
            (max(0.0, start[op.id] - origin), int(size)) for op, size in zip(computations, memory, strict=True)
        ),
    )


def label(op: Op) -> str:
    """Return what people call ``op``, e.g. ``"prefetch weight 4"`` or ``"forward 3 again"``."""
    words = " ".join(part for part in (op.kind, op.payload, str(op.block)) if part)
    if op.save is not None:
        words += " again"
    return f"{words}, direct" if op.zero_copy or op.writes_gradients else words


def _require_progress(plan: Plan) -> None:
    """Raise for an op that waits for an op which does not exist or is issued later."""
    issued: set[int] = set()
    known = {op.id for op in plan.ops}
    for op in plan.ops:
        for other in op.after:
            if other not in known:
                raise PlanError(f"op {op.id} ({label(op)}) waits for op {other}, which the plan does not have")
            if other < op.id and other not in issued:
                late = next(o for o in plan.ops if o.id == other)
                raise PlanError(
                    f"deadlock: op {op.id} ({label(op)}) waits for op {other} ({label(late)}), which is issued after it"
                )
        issued.add(op.id)
