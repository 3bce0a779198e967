"""How much later device copies may come and how much earlier they may go. Knows uses and runs; places nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lt_offload.plan.build.copies import DeviceCopy
from lt_offload.plan.build.groups import CopyGroup
from lt_offload.plan.iteration.decisions import Decisions, Interval, copy_uses
from lt_offload.plan.iteration.memory import backward_steps
from lt_offload.schema.profile import Profile


class FlexibleStay:
    """A stay of a run that may be shortened at both ends. Times are steps since its first one."""

    def __init__(self, run: CopyGroup, decisions: Decisions, profile: Profile) -> None:
        assert run.interval is not None
        self.run, self.steps, copy = run, 2 * len(profile.blocks), run.copies[0]
        self.origin = run.interval.start
        self.start, self.end = 0, self._since(run.interval.end)
        tensor, decision = profile.tensors[copy.tensor], decisions.tensors[copy.tensor]
        weight = copy.payload == "weight"
        needed = copy_uses(copy.tensor, decisions, profile) if weight else backward_steps(tensor.blocks, profile)[-1:]
        left = decision.write_back if weight else decision.state_offload_after
        inside = [at for step in needed if (at := self._since(step)) <= self.end]
        self.latest_start = max(min(inside) - 1, 0)
        """The prefetch still has a step to run beside."""
        self.earliest_end = max(inside)
        if left is not None and self._since(left) <= self.end:
            self.earliest_end = max(self.earliest_end, self._since(left))

    def moves(self, step: int) -> Iterator[tuple[int, bool]]:
        """Yield (steps lost, whether the start moves) for the ways not to be there in ``step``."""
        at = self._since(step)
        if self.start <= at < self.latest_start:
            yield at - self.start + 1, True
        if self.earliest_end < at <= self.end:
            yield self.end - at + 1, False

    def shorten(self, step: int, late: bool) -> list[int]:
        """Begin after ``step`` or end before it; return the steps that are freed."""
        at = self._since(step)
        freed = range(self.start, at + 1) if late else range(at, self.end + 1)
        if late:
            self.start = at + 1
        else:
            self.end = at - 1
        return self._steps(freed)

    def lifetimes(self) -> list[tuple[int, int]]:
        """Return every (start, end) it may have, the longest first."""
        found = [
            (start, end)
            for start in range(self.start, max(self.start, self.latest_start) + 1)
            for end in range(self.end, self.earliest_end - 1, -1)
        ]
        return sorted(found, key=lambda life: life[0] - life[1])

    def steps_of(self, lifetime: tuple[int, int]) -> tuple[int, ...]:
        """Return the steps of one of :meth:`lifetimes`."""
        return tuple(self._steps(range(lifetime[0], lifetime[1] + 1)))

    @property
    def interval(self) -> Interval:
        """The stay as it is now."""
        return Interval(start=(self.origin + self.start) % self.steps, end=(self.origin + self.end) % self.steps)

    def _since(self, step: int) -> int:
        return (step - self.origin) % self.steps

    def _steps(self, since: range) -> list[int]:
        return [(self.origin + at) % self.steps for at in since]


def with_stays(decisions: Decisions, copies: Sequence[DeviceCopy], intervals: Sequence[FlexibleStay]) -> Decisions:
    """Return ``decisions`` with these stays, which are those of all ``copies`` that move."""
    now = {id(copy): item.interval for item in intervals for copy in item.run.copies}
    weights: dict[int, list[Interval]] = {}
    tensors = list(decisions.tensors)
    for copy in copies:
        if copy.interval is None:
            continue
        if copy.payload == "weight":
            weights.setdefault(copy.tensor, []).append(now[id(copy)])
        else:
            tensors[copy.tensor] = replace(tensors[copy.tensor], state_interval=now[id(copy)])
    for tensor, found in weights.items():
        tensors[tensor] = replace(tensors[tensor], intervals=tuple(found))
    return replace(decisions, tensors=tuple(tensors))
