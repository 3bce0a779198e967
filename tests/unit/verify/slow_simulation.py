"""A second simulation, by the definitions alone: it looks at every op again at every moment, and is slow."""

from __future__ import annotations

from lt_offload.schema.plan import Op, Plan, deadlines
from lt_offload.schema.profile import Profile

ITERATIONS = 4
Activity = tuple[str, int, int]
"""``own``, ``read`` or ``write``; the iteration; the op."""


def iteration_s(plan: Plan, profile: Profile) -> float:
    """Return how long one of the last two of four iterations takes on average."""
    return SlowSimulation(plan, profile).run()


class SlowSimulation:
    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        self.everything = [(iteration, op.id) for iteration in range(ITERATIONS) for op in plan.ops]
        self.now = 0.0
        self.started: dict[tuple[int, int], float] = {}
        self.ended: dict[tuple[int, int], float] = {}
        self.left: dict[Activity, float] = {}
        """What is being worked on, and the seconds that are left of it at full speed."""
        self.launch = [self._launch(op) for op in plan.ops]

    def _launch(self, op: Op) -> float:
        block = self.profile.blocks[op.block]
        return block.launch_s if op.kind == "forward" or (op.kind == "backward" and block.has_backward) else 0.0

    def run(self) -> float:
        while len(self.ended) < len(self.everything):
            while self._end_something() or self._start_something():
                pass
            if len(self.ended) == len(self.everything):
                break
            rates = self._rates()
            times = [seconds / rates[activity] for activity, seconds in self.left.items()]
            launches = [self._issued(*each) for each in self.everything if each not in self.started]
            launches += [self._launched(*each) for each in self.started if each not in self.ended]
            times += [time - self.now for time in launches if time > self.now]
            step = min(times)
            self.left = {activity: seconds - step * rates[activity] for activity, seconds in self.left.items()}
            self.now += step
        last = [op.id for op in self.plan.ops if op.lane == "compute"]
        ends = [max(self.ended[iteration, op] for op in last) for iteration in range(ITERATIONS)]
        return (ends[-1] - ends[-3]) / 2

    # -- beginnings and ends -----------------------------------------------------------------------------------------

    def _issued(self, iteration: int, op: int) -> float:
        return iteration * sum(self.launch) + sum(self.launch[:op])

    def _launched(self, iteration: int, op: int) -> float:
        return iteration * sum(self.launch) + sum(self.launch[: op + 1]) if self.launch[op] else 0.0

    def _done(self, iteration: int, op: int) -> bool:
        return iteration < 0 or (iteration, op) in self.ended

    def _may_start(self, iteration: int, op: int) -> bool:
        if (iteration, op) in self.started or self._issued(iteration, op) > self.now + 1e-12:
            return False
        mine = self.plan.ops[op]
        if not all(self._done(iteration - (other >= op), other) for other in mine.after):
            return False
        if mine.lane == "none":
            return True
        if mine.lane == "host":
            return self._done(iteration - 1, op)
        queue = [each for each in self.everything if self.plan.ops[each[1]].lane == mine.lane]
        return all(each in self.ended for each in queue[: queue.index((iteration, op))])

    def _start_something(self) -> bool:
        ready = [each for each in self.everything if self._may_start(*each)]
        ordered = [each for each in ready if self.plan.ops[each[1]].lane != "host"]
        if ordered:
            self._start(*ordered[0])
            return True
        updates = [each for each in ready if each not in ordered]
        if not updates or any(self.plan.ops[op].lane == "host" for _, _, op in self.left):
            return False
        needed = deadlines(self.plan.ops)
        count = len(self.plan.ops)
        self._start(*min(updates, key=lambda each: (each[0] * count + needed.get(each[1], 2 * count), each)))
        return True

    def _start(self, iteration: int, op: int) -> None:
        mine, hardware = self.plan.ops[op], self.profile.hardware
        self.started[iteration, op] = self.now
        if mine.lane != "none":
            self.left["own", iteration, op] = mine.seconds
        if mine.kind in ("forward", "backward") and mine.bytes:
            self.left["read", iteration, op] = mine.bytes / hardware.h2d_bytes_per_s
        if mine.kind == "backward":
            written = [o for o in self.plan.ops if o.writes_gradients and o.step == mine.step]
            for each in written:
                self.left["write", iteration, each.id] = each.bytes / hardware.d2h_bytes_per_s

    def _end_something(self) -> bool:
        self.left = {activity: seconds for activity, seconds in self.left.items() if seconds > 1e-9}
        found = False
        for iteration, op in [each for each in self.started if each not in self.ended]:
            working = any((kind, iteration, op) in self.left for kind in ("own", "read", "write"))
            if not working and self._launched(iteration, op) <= self.now + 1e-12:
                self.ended[iteration, op] = self.now
                found = True
        return found

    # -- speeds ------------------------------------------------------------------------------------------------------

    def _lane(self, activity: Activity) -> str:
        kind, _, op = activity
        return {"read": "h2d", "write": "d2h"}.get(kind, self.plan.ops[op].lane)

    def _rates(self) -> dict[Activity, float]:
        shares = {activity: self.profile.contention.of(self._lane(activity)) for activity in self.left}  # type: ignore[arg-type]
        most = {a: 1 / sum(self._lane(a) == self._lane(other) for other in self.left) for a in self.left}

        def taken(level: float) -> float:
            return sum(min(shares[a] * most[a], level) for a in self.left)

        low, high = 0.0, 1.0
        for _ in range(60):  # the highest level at which all that is given is there
            middle = (low + high) / 2
            low, high = (middle, high) if taken(middle) <= 1 else (low, middle)
        return {a: min(most[a], high / shares[a]) if shares[a] else most[a] for a in self.left}
