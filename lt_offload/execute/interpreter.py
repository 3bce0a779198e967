"""Carries a program out: goes through its steps and hands each op to the part of the engine that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.device.record import Recorder
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Program
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.schema.plan import Op, Pass


class Interpreter:
    """One pass through the steps per micro-batch: each begins with its prefetches, and ends with what follows."""

    def __init__(
        self,
        program: Program,
        weights: Sequence[Weight],
        *,
        residency: Residency,
        gradients: Gradients,
        runs: BlockRuns,
        recorder: Recorder,
    ) -> None:
        self._program, self._steps = program, program.steps[program.passes[0]]
        self._weights = [[weights[tensor] for tensor in tensors] for tensors in program.tensors]
        """By op."""
        self._calls = {op.id: partial(self._move_activations, op) for op in program.activations} | residency.moves
        """By op that is issued: what carries it out."""
        self.reduce: Callable[[Op, Sequence[Weight]], None] = lambda op, weights: None
        """Begins to add the sums of some weights to those of other machines, if they are complete."""
        self._residency, self._gradients = residency, gradients
        self._runs, self._recorder = runs, recorder
        self.timeline = program.timeline
        self.cursor = 0
        """The next step."""
        self.passes = 0
        """Complete ones so far."""

    def start(self, which: Pass, *, last: bool = False) -> None:
        """Carry out the ops of this kind of pass from now on; ``last``: sums of gradients are complete with it."""
        assert self.cursor == 0
        self._steps = self._program.steps[which]
        self._gradients.start(which, last=last)

    def settle(self, which: Pass) -> None:
        """Carry out the updates of this kind of pass without its computations: the sums are all there is."""
        self.start(which)
        for at, step in enumerate(self._steps):
            self.begin(at)
            for op in step.settled:
                self._gradients.settle_on_device(self._weights[op.id])
            self.end()
        self.finish()

    def finish(self) -> None:
        """Go through what is left of the pass, and be ready for the next."""
        # Blocks before the first trainable parameter have no backward, but ops may be planned for their steps.
        self.skip_to(len(self._steps))
        self.cursor = 0
        self.passes += 1

    @property
    def begun(self) -> bool:
        """True if a pass has begun and not ended."""
        return self.cursor > 0

    @property
    def expected(self) -> str:
        """The next step, in words."""
        if self.cursor == len(self._steps):
            return "the end of the iteration"
        step = self.timeline.steps[self.cursor]
        return f"block {step.block}" if step.kind == "forward" else f"the {step.kind} of block {step.block}"

    def again(self, step: int) -> Sequence[Op]:
        """Return the forwards that run again in ``step``."""
        return self._steps[step].again

    def begin(self, at: int) -> None:
        """Issue what precedes the computation of step ``at``."""
        assert at == self.cursor, f"step {at} after step {self.cursor - 1}"
        self.cursor = at + 1
        self._recorder.begin_step()
        for op in self._steps[at].before:
            self._calls[op.id]()

    def end(self) -> None:
        """Issue what follows the computation of the step that was begun last."""
        at = self.cursor - 1
        step = self._steps[at]
        # First what leaves: the host's updates wait for the copies that are queued here.
        for op, departure in self._gradients.send():
            self._residency.release_at(at if op.release_after is None else op.release_after, departure)
        for op in step.updates:
            self._gradients.use_on_host(op, self._weights[op.id], self._urgency(op))
        for op in step.reduced:
            self.reduce(op, self._weights[op.id])
        for op in step.after:
            self._calls[op.id]()
        self._residency.end_step(at)
        self._recorder.end_step()

    def skip_to(self, step: int) -> None:
        """Go through the steps before ``step`` without computing anything: their blocks have no backward."""
        while self.cursor < step:
            self.begin(self.cursor)
            self.end()

    def _urgency(self, op: Op) -> int:
        """Return when the result of an update on the host is needed, as a position among the ops of all iterations."""
        # With no deadline nothing in the next iteration waits for it, so it comes after everything that something waits
        # for.
        ops = self._program.size
        return self.passes * ops + self._program.deadlines.get(op.id, 2 * ops)

    def _move_activations(self, op: Op) -> None:
        run = self._runs.find(op.block)
        # What ran before there was a plan has saved more than was planned: it comes back when it is needed.
        if run is None or run.offloader is None or self._runs.surveyed:
            return
        if op.lane == "h2d":
            run.offloader.fetch(op.id)
        else:
            self._residency.leave(op, run.offloader)
