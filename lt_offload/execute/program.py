"""A plan's ops sorted by step, whether they fit the model, and the walk that issues them around the computations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from lt_offload.errors import PlanError, UnsupportedError
from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.device.record import Recorder
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import is_compiled
from lt_offload.schema.accesses import writes
from lt_offload.schema.plan import Op, Pass, Plan, Timeline, deadlines
from lt_offload.schema.profile import fingerprint


class Walk:
    """One pass through the steps per micro-batch."""

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[Weight],
        *,
        residency: Residency,
        gradients: Gradients,
        runs: BlockRuns,
        recorder: Recorder,
    ) -> None:
        self._programs: dict[Pass, list[StepOps]] = {which: program(plan, which) for which in plan.passes}
        self._steps = self._programs[plan.passes[0]]
        used = [op for op in plan.ops if op.uses_gradients or op.kind == "reduce"]
        self._updated = {op.id: [weights[t] for t in plan.tensors(op)] for op in used}
        """By op: the weights whose gradients it uses."""
        self.reduce: Callable[[Op, Sequence[Weight]], None] = _alone
        """Begins to add the sums of some weights to those of other machines, if they are complete."""
        self._residency, self._gradients = residency, gradients
        self._runs, self._recorder = runs, recorder
        runs.gradients = gradients
        self._plan, self._ops = plan, len(plan.ops)
        self.timeline = Timeline(plan.timeline)
        self._deadlines = deadlines(plan.ops)
        self.cursor = 0
        """The next step."""
        self.passes = 0
        """Complete ones so far."""

    def start(self, which: Pass, *, last: bool = False) -> None:
        """Carry out the ops of this kind of pass from now on; ``last``: sums of gradients are complete with it."""
        assert self.cursor == 0
        self._steps = self._programs[which]
        self._gradients.start(which, last=last)

    def settle(self, which: Pass) -> None:
        """Carry out the updates of this kind of pass without its computations: the sums are all there is."""
        self.start(which)
        for at, step in enumerate(self._steps):
            self.begin(at)
            for op in step.settled:
                self._gradients.settle_on_device(self._updated[op.id])
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

    def again(self, step: int) -> Sequence[Op]:
        """Return the forwards that run again in ``step``."""
        return self._steps[step].again

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
        # First what leaves: the host's updates wait for the copies that are queued here.
        for op, departure in self._gradients.send():
            self._residency.release_at(at if op.release_after is None else op.release_after, departure)
        for op in self._steps[at].updates:
            self._gradients.use_on_host(op, self._updated[op.id], self._urgency(op))
        for op in self._steps[at].reduced:
            self.reduce(op, self._updated[op.id])
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
        # With no deadline nothing in the next iteration waits for it, so it comes after everything that something waits
        # for.
        return self.passes * self._ops + self._deadlines.get(op.id, 2 * self._ops)

    def _issue(self, op: Op) -> None:
        if op.payload != "activation":
            self._residency.issue(op)
            return
        run = self._runs.find(op.block)
        # What ran before there was a plan has saved more than was planned: it comes back when it is needed.
        if run is None or run.offloader is None or self._runs.surveyed:
            return
        if op.kind == "prefetch":
            run.offloader.fetch(op.id)
        else:
            self._residency.leave(op, run.offloader)


def _alone(op: Op, weights: Sequence[Weight]) -> None:
    """With one machine there is nothing to reduce."""


@dataclass(slots=True)
class StepOps:
    """Ops around one forward or backward, but for those that gradients drive: see ``updates/gradients.py``."""

    before: list[Op] = field(default_factory=list)
    """Prefetches."""
    again: list[Op] = field(default_factory=list)
    """Forwards that run again before the backward."""
    compute: Op | None = None
    updates: list[Op] = field(default_factory=list)
    """Ops of the host that use gradients."""
    reduced: list[Op] = field(default_factory=list)
    """Ops that add sums up over machines."""
    settled: list[Op] = field(default_factory=list)
    """Updates on the device that no gradient drives."""
    after: list[Op] = field(default_factory=list)
    """Other offloads, then drops."""


def program(plan: Plan, which: Pass) -> list[StepOps]:
    """Return the steps of one kind of pass.

    Raises:
        PlanError: if an op stands where the issue order does not allow it.
    """
    steps = [StepOps() for _ in plan.timeline]
    for op in plan.program(which):
        if not 0 <= op.step < len(steps):
            raise PlanError(f"op {op.id} is at step {op.step}; the plan has steps 0 to {len(steps) - 1}")
        step = steps[op.step]
        if op.save is not None:
            _check_again(op, plan, step)
            step.again.append(op)
        elif op.computes:
            step.compute = op
        elif op.kind == "prefetch":
            (step.before if step.compute is None else step.after).append(op)
        elif op.uses_gradients:
            # On the device, gradients drive what uses them, within the backward, and `settled` is for passes without.
            (step.updates if op.lane == "host" else step.settled).append(op)
        elif op.kind == "reduce":
            step.reduced.append(op)
        # Copies of gradients are issued by `send`, as gradients are complete.
        elif op.payload != "grad":
            step.after.append(op)
    for index, step in enumerate(steps):
        if step.compute is None and which != "settling":
            raise PlanError(f"step {index} of the plan has no computation")
    return steps


def _check_again(op: Op, plan: Plan, step: StepOps) -> None:
    during = plan.timeline[op.step]
    if op.kind != "forward" or during.kind == "forward" or op.block > during.block or step.compute is not None:
        raise PlanError(
            f"op {op.id} has save={op.save!r} and is the {op.kind} of block {op.block} in step {op.step}; a forward "
            "runs again in a backward step, before its backward, and is of that block or an earlier one"
        )


def first_changes(plan: Plan) -> dict[tuple[int, bool], int]:
    """Return, by tensor and whether it is its states, the first op from which on its host copy is another one."""
    changes: dict[tuple[int, bool], int] = {}
    for op in plan.program(plan.passes[-1]):
        states = [payload == "state" for payload in writes(op, "host") if payload in ("weight", "state")]
        for key in itertools.product(plan.tensors(op), states):
            changes.setdefault(key, op.id)
    return changes


def owners(blocks: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return, per tensor, the blocks that use it, ascending."""
    users: dict[int, list[int]] = {}
    for block, tensors in enumerate(blocks):
        for tensor in tensors:
            users.setdefault(tensor, []).append(block)
    return users


def check_match(structure: Structure, optimizer: Optimizer | None, plan: Plan | None) -> None:
    """Raise unless ``plan`` was made for the model of ``structure`` and ``optimizer`` can carry it out.

    Raises:
        PlanError: if the plan belongs to another model, or takes a compiled block apart.
        UnsupportedError: if there is a plan and no optimizer.
    """
    if plan is None:
        return
    used = owners([block.tensors for block in structure.blocks])
    rows = [
        (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, tuple(used[i]))
        for i, (_, p) in enumerate(structure.tensors)
    ]
    if fingerprint(rows, len(structure.blocks)) != plan.fingerprint:
        raise PlanError(
            f"the plan was made for another model ({plan.model}, {len(plan.options)} blocks, {len(plan.update_places)} "
            f"tensors); this one has {len(structure.blocks)} blocks and {len(rows)} tensors, or other shapes, dtypes "
            "or frozen parameters. Plan again for this model"
        )
    if optimizer is None:
        raise UnsupportedError("a plan without an optimizer: training needs the optimizer that the plan was made for")
    for block, option in zip(structure.blocks, plan.options, strict=True):
        if option == "mixed" and is_compiled(block.module):
            raise PlanError(
                f"the plan handles block {block.name} with option 'mixed', which takes its operations apart, but the "
                "block is compiled. Plan again with the blocks compiled, or leave compile() out"
            )
