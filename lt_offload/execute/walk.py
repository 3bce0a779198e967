"""Walks through the steps of a plan and issues the ops around the computations, in the plan's order. Runs no block."""

from __future__ import annotations

from collections.abc import Sequence

from lt_offload.execute.copies import Residency
from lt_offload.execute.frames import Frames
from lt_offload.execute.gradients import Gradients
from lt_offload.execute.program import StepOps
from lt_offload.execute.record import Recorder
from lt_offload.execute.tensors import Weight
from lt_offload.schema.plan import Op, Plan, Timeline, deadlines


class Walk:
    """One pass through the steps per iteration."""

    def __init__(
        self,
        plan: Plan,
        steps: Sequence[StepOps],
        weights: Sequence[Weight],
        *,
        residency: Residency,
        gradients: Gradients,
        frames: Frames,
        recorder: Recorder,
    ) -> None:
        self._steps, self._weights = steps, weights
        self._residency, self._gradients = residency, gradients
        self._frames, self._recorder = frames, recorder
        self._plan, self._ops = plan, len(plan.ops)
        self.timeline = Timeline(plan.timeline)
        self._deadlines = deadlines(plan.ops)
        self.cursor = 0
        """The next step."""

    def awaits(self, kind: str, block: int) -> bool:
        """Return whether the next step is this one."""
        step = self._plan.timeline[self.cursor] if self.cursor < len(self._steps) else None
        return step is not None and step.kind == kind and step.block == block

    @property
    def expected(self) -> str:
        """The next step, in words."""
        if self.cursor == len(self._steps):
            return "the end of the iteration"
        step = self._plan.timeline[self.cursor]
        return f"block {step.block}" if step.kind == "forward" else f"the {step.kind} of block {step.block}"

    def begin(self, at: int) -> None:
        """Issue what precedes the computation of step ``at``."""
        assert at == self.cursor, f"step {at} after step {self.cursor - 1}"
        self.cursor = at + 1
        self._recorder.begin_step()
        for op in self._steps[at].before:
            self._issue(op)

    def end(self) -> None:
        """Issue what follows the computation of the step that was begun last."""
        at = self.cursor - 1
        for op in self._steps[at].updates:
            weights = [self._weights[t] for t in self._plan.tensors(op)]
            self._gradients.update_on_host(weights, f"update {op.block}", op.id, self._urgency(op))
        for op in self._steps[at].after:
            self._issue(op)
        self._residency.end_step(at)
        self._recorder.end_step()

    def skip_to(self, step: int) -> None:
        """Go through the steps before ``step`` without computing anything: their blocks have no backward."""
        while self.cursor < step:
            self.begin(self.cursor)
            self.end()

    def _urgency(self, op: Op) -> int:
        """Return when the result of an update on the host is needed, as a position among the ops of all iterations."""
        return self._recorder.iterations * self._ops + self._deadlines.get(op.id, 2 * self._ops)

    def _issue(self, op: Op) -> None:
        if op.payload != "activation":
            self._residency.issue(op)
            return
        frame = self._frames.find(op.block)
        if frame is None or frame.pager is None:
            return
        if op.kind == "prefetch":
            frame.pager.fetch(op.id)
        else:
            self._residency.leave(op, frame.pager)
