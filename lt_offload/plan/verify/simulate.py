"""Simulation of a plan: lanes that work through their ops in order, and a thread that issues them.

An op starts when its lane is free, everything in ``after`` has ended, and the issuing thread has come to it. The
thread waits for nothing; each computation costs it the block's launch time. The host takes the most urgent update of
those that may start. Several iterations are unrolled, the last ones are reported. An iteration is what belongs to one
update: of a plan for windows, all of its passes, of which more than three are not walked through one by one.

Ops take as long as the speeds of the profile say, longer while lanes slow each other down: see
:mod:`lt_offload.plan.verify.lanes`. A computation that reads in host memory is not done before it has what it reads.
Gradients that a backward writes to host memory cross the link from its begin on.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from lt_offload.arguments import checked
from lt_offload.errors import PlanError
from lt_offload.plan.iteration.durations import durations, exchange_s, norm_s
from lt_offload.plan.iteration.memory import computation_bytes, host_bytes
from lt_offload.plan.iteration.passes import more_passes, shown_passes, unrolled
from lt_offload.plan.verify.check import check, mismatches
from lt_offload.plan.verify.lanes import COMPUTE, HOST, NUMBER, READ, WRITE, SimulatedLanes
from lt_offload.schema.lanes import LANES
from lt_offload.schema.plan import Op, Plan, deadlines
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Span, Trace

_WARM_UP = 2
_MEASURED = 2
_ITERATIONS = _WARM_UP + _MEASURED


@checked
def simulate(plan: Plan, profile: Profile) -> Trace:
    """Return the iteration that ``plan`` would do in the steady state on the machine of ``profile``.

    Its time is that of a window; its spans are those of the window's passes, of the first two and the last one if there
    are more than three.

    Raises:
        PlanError: if an op waits for something that cannot have happened before, ``plan`` is of another model or
            contradicts itself so that there is nothing to simulate.
    """
    other = next(mismatches(plan, profile), None)
    if other is not None:
        raise PlanError(f"the plan is not one of the profile's model: {other}")
    profile = profile.with_host_threads(plan.host_threads)
    try:
        # Where ids are positions, an op waits for what was issued before it, or in the iteration before: no deadlock.
        if any(op.id != at or min(op.after, default=0) < 0 for at, op in enumerate(plan.ops)):
            raise ValueError("its ops are not in order")
        simulation = _Simulation(plan, profile)
        simulation.run()
        return _trace(plan, profile, simulation)
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        # Only now: a sound plan goes through without being checked here, and check() has better words than an index
        # error.
        violations = check(plan, profile)
        why = violations[0] if violations else f"{type(error).__name__}: {error}"
        raise PlanError(f"the plan cannot be simulated: {why}") from error


class _Simulation:
    """The ops of all iterations in time; their numbers are counted on from iteration to iteration."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        ops, self.origin = unrolled(plan, shown_passes(plan))
        self.ops = len(ops)
        self.count = _ITERATIONS * self.ops
        seconds = durations(plan, profile)
        self.seconds = [seconds[op] for op in self.origin]
        self.lane = [NUMBER.get(op.lane) for op in ops]
        self.lanes = SimulatedLanes(profile.contention)
        self.start, self.finish = [0.0] * self.count, [0.0] * self.count
        self.computed = [0.0] * _ITERATIONS
        """By iteration: the end of its last computation."""
        issued, passed = 0.0, [0.0]
        for op in ops:
            issued += profile.blocks[op.block].launch_s if op.kind == "forward" or _runs(op, profile) else 0.0
            passed.append(issued)
        self.passed = passed
        """By op: seconds of the iteration in which the thread has launched computations before; and after the last."""
        self.missing = [0] * self.count
        """By op: number of others that it waits for."""
        self.waiters: list[list[int]] = [[] for _ in ops]
        """By op of one iteration: distances, in ops, to those that wait for it."""
        self._count_waits(ops)
        self.queues: list[deque[int]] = [deque() for _ in LANES]
        """By lane: its ops to come; empty for the lane that keeps no order."""
        for number in range(self.count):
            lane = self.lane[number % self.ops]
            if lane is not None and lane != HOST:
                self.queues[lane].append(number)
        self.updates: list[tuple[int, int]] = []
        """The updates that the host could begin: urgency and number."""
        needed = deadlines(ops)
        self.urgency = {op.id: needed.get(op.id, 2 * self.ops) for op in ops if op.lane == "host"}
        self.timers: list[tuple[float, int]] = []
        """Times at which the thread comes to ops that wait for nothing else, or has launched a computation (-1)."""
        self.ready = [False] * self.count
        self.running: list[int | None] = [None] * len(LANES)
        self.read, self.written = self._direct(ops, profile)
        self.writes = [op.writes_gradients for op in ops]

    def _count_waits(self, ops: Sequence[Op]) -> None:
        for op in ops:
            # The host does an update once per iteration, whatever is more urgent.
            for other in {*op.after, op.id} if op.lane == "host" else set(op.after):
                later = (op.id - other) if other < op.id else op.id - other + self.ops
                self.waiters[other].append(later)
                for number in range(op.id, self.count, self.ops):
                    # What would have been before the first iteration counts as done.
                    self.missing[number] += number >= later

    def _direct(self, ops: Sequence[Op], profile: Profile) -> tuple[list[float], list[float]]:
        """Return, by op, the seconds for which computations use the links alone: to read, and to write gradients."""
        hardware = profile.hardware
        read, written = [0.0] * self.ops, [0.0] * self.ops
        began = 0
        for op in ops:
            if op.computes:
                began = op.id
                read[op.id] = op.bytes / hardware.h2d_bytes_per_s
            elif op.writes_gradients:
                # Counted at the backward, which writes from its begin on; the op behind it only waits until all of it
                # has arrived.
                written[began] += op.bytes / hardware.d2h_bytes_per_s
        return read, written

    def run(self) -> None:
        lanes, timers = self.lanes, self.timers
        for number in range(self.count):
            if not self.missing[number]:
                self._may_start(number)
        while True:
            self._start()
            lanes.settle()
            until = min(lanes.ends)
            # Something may become possible before any work ends: the issuing thread comes to an op.
            if timers and timers[0][0] < until:
                until = timers[0][0]
            if until == math.inf:
                return
            lanes.now = max(lanes.now, until)
            while timers and timers[0][0] <= lanes.now:
                number = heapq.heappop(timers)[1]
                if number >= 0:
                    self._issued(number)
            ended = lanes.done()
            for lane in ended:
                lanes.end(lane)
            for lane in ended:
                if lane < len(LANES) and lane != COMPUTE:
                    self._done(lane)
            computation = self.running[COMPUTE]
            if computation is not None:
                self._try_computation(computation)

    # -- beginnings --------------------------------------------------------------------------------------------------

    def _may_start(self, number: int) -> None:
        """Note that an op waits for no other any more."""
        iteration, op = divmod(number, self.ops)
        issued = iteration * self.passed[-1] + self.passed[op]
        if issued > self.lanes.now:
            heapq.heappush(self.timers, (issued, number))
        else:
            self._issued(number)

    def _issued(self, number: int) -> None:
        op = number % self.ops
        lane = self.lane[op]
        if lane is None:
            self.start[number] = self.lanes.now
            self._ended(number)
        elif lane == HOST:
            heapq.heappush(self.updates, (number - op + self.urgency[op], number))
        else:
            self.ready[number] = True

    def _start(self) -> None:
        for lane, queue in enumerate(self.queues):
            if self.running[lane] is None and queue and self.ready[queue[0]]:
                self._begin(lane, queue.popleft())
        # What ends at this moment may still bring a more urgent update.
        if self.running[HOST] is None and self.updates and min(self.lanes.ends) > self.lanes.now:
            self._begin(HOST, heapq.heappop(self.updates)[1])

    def _begin(self, lane: int, number: int) -> None:
        op = number % self.ops
        self.running[lane], self.start[number] = number, self.lanes.now
        self.lanes.begin(lane, self.seconds[op])
        if lane == COMPUTE:
            if self.read[op]:
                self.lanes.begin(READ, self.read[op])
            if self.written[op]:
                self.lanes.begin(WRITE, self.written[op])

    # -- ends --------------------------------------------------------------------------------------------------------

    def _try_computation(self, number: int) -> None:
        """End a computation that has been launched and carried out, and has read and written all it should."""
        iteration, op = divmod(number, self.ops)
        lanes = self.lanes
        if lanes.busy & (1 << COMPUTE | 1 << READ) or (self.writes[op] and lanes.busy & 1 << WRITE):
            return
        # The last kernel of a computation cannot run before it has been launched.
        launched = iteration * self.passed[-1] + self.passed[op + 1]
        if self.passed[op + 1] > self.passed[op] and launched > lanes.now:
            heapq.heappush(self.timers, (launched, -1))
            return
        self.computed[iteration] = lanes.now
        self._done(COMPUTE)

    def _done(self, lane: int) -> None:
        number = self.running[lane]
        assert number is not None
        self.running[lane] = None
        self._ended(number)

    def _ended(self, number: int) -> None:
        """Note the end of an op, and start others that wait for nothing any more."""
        self.finish[number] = self.lanes.now
        for later in self.waiters[number % self.ops]:
            other = number + later
            if other < self.count:
                self.missing[other] -= 1
                if not self.missing[other]:
                    self._may_start(other)


def _runs(op: Op, profile: Profile) -> bool:
    return op.kind == "backward" and profile.blocks[op.block].has_backward


def _trace(plan: Plan, profile: Profile, simulation: _Simulation) -> Trace:
    memory = computation_bytes(plan, profile)
    start, end = (times[-simulation.ops :] for times in (simulation.start, simulation.finish))
    origin = min(start)
    ops = [(at, plan.ops[number]) for at, number in enumerate(simulation.origin)]
    computations = [at for at, op in ops if op.computes]
    seconds = (simulation.computed[-1] - simulation.computed[-1 - _MEASURED]) / _MEASURED
    if more_passes(plan):
        first, second = (end[computations[(at + 1) * len(memory) - 1]] for at in (0, 1))
        # Passes that are not walked through are as long as the second: the first one follows updates, the last one
        # makes them.
        seconds += more_passes(plan) * (second - first)
    seconds += exchange_s(plan, profile) + norm_s(plan, profile)
    return Trace(
        source="simulated",
        iteration_time=seconds,
        device_peak=int(memory.max()),
        host_peak=host_bytes(plan, profile),
        budget_bytes=plan.budget_bytes,
        spans=tuple(
            Span(op=op.id, lane=op.lane, label=op.label, start=start[at] - origin, end=end[at] - origin)
            for at, op in ops
            if op.lane != "none"
        ),
        memory=tuple(
            (max(0.0, start[at] - origin), int(memory[number % len(memory)])) for number, at in enumerate(computations)
        ),
    )
