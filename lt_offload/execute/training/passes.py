"""The passes of an iteration: a forward and a backward through the blocks, each as the model or autograd calls it.

The first block's forward with gradients begins a pass, the backward of the first block ends it. Every step issues its
prefetches, runs its computation, then issues what follows, exactly in the order of the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.errors import UnsupportedError
from lt_offload.execute.blocks.deferred import DeferredForward, DeferredForwards
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.blocks.shared_inputs import SharedInputs
from lt_offload.execute.interpreter import Interpreter
from lt_offload.execute.iteration import State
from lt_offload.execute.memory.activations import HostPool
from lt_offload.execute.memory.bound_weights import BoundWeights
from lt_offload.execute.memory.streaming import Streaming
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Program
from lt_offload.execute.training.parts import EngineParts
from lt_offload.execute.updates.common_states import CommonStates
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.others import SumsOfAll
from lt_offload.execute.user_code import checks
from lt_offload.execute.user_code.checks import Backward, Consumers, OwnParameters
from lt_offload.execute.user_code.step_hooks import ManualLoop, OptimizerStepHook
from lt_offload.model.calls import tensors_of
from lt_offload.schema.plan import Op

Lookup = tuple[Tensor, Tensor]
"""A table, and the rows that a batch looks up there."""


@dataclass(slots=True, eq=False)
class SurveyedForward:
    """A forward that ran before the plan was made."""

    runs: dict[int, weakref.ref[BlockRun]]
    """By block. Weakly: a loss that is dropped takes them with it, as in every other step."""
    lookups: list[Lookup]
    """Rows that the first block looks up."""
    begun: bool = False
    """Its backward has begun."""

    @property
    def alive(self) -> bool:
        """True if its backward may still come."""
        return any(run() is not None for run in self.runs.values())


class Passes:
    """Carries out the passes of ``program``."""

    manual: ManualLoop | None = None
    """Follows a loop that is not ours; elsewhere ``Engine.iteration`` encloses every backward."""

    of_all: SumsOfAll | None = None
    """Sums with other processes that train the same model, of what the last pass of a window leaves."""
    common: CommonStates | None = None
    """Host copies in common with them: what users have written is exchanged, and updates are shared out."""

    def __init__(
        self,
        parts: EngineParts,
        program: Program,
        *,
        pool: HostPool,
        streaming: Streaming,
        gradients: Gradients,
        step: OptimizerStepHook,
    ) -> None:
        structure, weights, blocks = parts.structure, parts.weights, parts.blocks
        recorder, residency = parts.recorder, parts.residency
        self._structure, self._weights, self._blocks = structure, weights, blocks
        self._recorder, self._residency = recorder, residency
        self._iteration, self._window = parts.iteration, parts.iteration.window
        self._guard, self._setup, self._view = parts.guard, parts.setup, parts.view
        runs = self._runs = BlockRuns(recorder.device, pool, structure, program, blocks, gradients)
        self._gradients, self.step = gradients, step
        self._presence = {
            op.id: BoundWeights(recorder.device, blocks[op.block], op, program.read_on_host[op.id])
            for op in program.computations
        }
        """By computation."""
        timeline, computing = program.timeline, {op.step: op.id for op in program.computations if op.save is None}
        forwards, backwards = map(timeline.forward, range(len(blocks))), map(timeline.backward, range(len(blocks)))
        self._forwards = [(step, self._presence[computing[step]]) for step in forwards]
        """By block: the step of its forward, and the presence of its weights there."""
        self._backwards = [(step, computing[step]) for step in backwards]
        """By block: the step of its backward, and the op."""
        self._anchor = torch.zeros((), requires_grad=True)
        self._backward = Backward(self._anchor)
        self._consumers = Consumers(lambda index: structure.blocks[index].name, runs.uses)
        self._own = [OwnParameters(block.name, block.module) for block in structure.blocks]
        self._deferred = DeferredForwards(
            program.deferred_forwards, program.options, runs, streaming, self._consumers.watch
        )
        self._surveyed: list[SurveyedForward] = []
        self.uses, self.gradients = runs.uses, gradients
        self._rest_complete = False
        """Gradients outside the blocks are those of all processes."""
        self._to_follow = 0
        """Passes of the same micro-batch behind the present one."""
        self._walk = Interpreter(
            program, weights, residency=residency, gradients=gradients, runs=runs, recorder=recorder
        )

    @property
    def waiting(self) -> int:
        """Forwards that wait for others before their backward."""
        surveyed = sum(not forward.begun and forward.alive for forward in self._surveyed)
        return self._deferred.waiting + surveyed

    @property
    def open(self) -> bool:
        """True if a backward of the present pass is still to come."""
        return self._runs.open

    def join(self, of_all: SumsOfAll, common: CommonStates | None) -> None:
        """Other processes train the same model."""
        self.of_all, self.common = of_all, common
        self._walk.reduce = self._reduce

    def _reduce(self, op: Op, weights: Sequence[Weight]) -> None:
        if self.of_all is not None and self._window.last and not self._to_follow:
            self.of_all.begin(op, weights)

    # -- forwards ----------------------------------------------------------------------------------------------------

    def forward(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run one block in training; raises ``UnsupportedError`` for a call that the plan cannot follow."""
        deferred = self._deferred
        step, presence = self._forwards[index]
        if index == 0:
            self._begin_micro_batch()
            self._begin_deferred() if deferred.due else self._begin_pass(self.waiting)
        waits = deferred.running
        if not (deferred.awaits(index) if waits else self._walk.cursor == step):
            raise UnsupportedError(
                f"block {self._structure.blocks[index].name} was called where {self._walk.expected} was expected; "
                "lt_offload needs every block to be called once per forward, in order"
            )
        limits.check_call(self._structure.blocks[index].name, kwargs)
        self._own[index].check()
        if waits:
            return deferred.forward(index, forward, args, kwargs, self._anchor, self._run_deferred)
        self._walk.begin(step)
        with presence:
            run = self._make_run(index, forward, args, kwargs)
            # Else this frame would hold the block's inputs through its forward, which the run may let go of.
            del args, kwargs
            if run.needs_backward:
                out = run.in_graph(self._anchor, self._run_backward, self._consumers.watch)
            else:
                out = run.run_frozen()
            self._runs.returned(out)
        self._walk.end()
        return out

    def _begin_micro_batch(self) -> None:
        """A forward begins; others of the same micro-batch may wait for their backward."""
        # Only asked: the state changes when what an earlier forward has left is cleaned up.
        self._iteration.check_forward()
        if self._walk.begun or self._runs:
            self._restart()
        self._guard.check_thread()
        self._enter()

    def _enter(self) -> None:
        """Find the model as users have left it."""
        self._setup.check()
        self._guard.begin()
        if self.common is not None:
            self.common.begin_pass()
        if self.manual is not None and not self.waiting:
            self._window.begin()
            if self._window.delayed:
                self._view.begin_in_window()

    def _begin_deferred(self) -> None:
        if not self._window.added and not self.waiting:
            self._recorder.begin()
        self._iteration.begin_forward()
        self._deferred.begin()

    def _begin_pass(self, waiting: int) -> None:
        """A pass begins; so many of the same micro-batch follow it."""
        self._window.begin_pass(waiting)
        self._to_follow, self._rest_complete = waiting, False
        self._iteration.begin_forward()
        alone = self.of_all is None  # else sums of other processes are added to these
        self._walk.start(self._window.which, last=self._window.delayed and self._window.last and not waiting and alone)
        if not self._residency.settled:
            self._residency.settle()
        for weight in self._weights:
            weight.uses = 0
        if not self._window.added and not self.waiting:
            self._recorder.begin()

    def _make_run(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> BlockRun:
        run = self._runs.make(index, forward, args, kwargs)
        for weight in self._blocks[index] if run.needs_backward else ():
            weight.uses += len(run.slices) * weight.param.requires_grad
        return run

    # -- a step that began without a plan ----------------------------------------------------------------------------

    def take_survey(self, shared: SharedInputs, forwards: Sequence[SurveyedForward]) -> None:
        """Carry out the backwards of ``forwards``, which ran before there was a plan, with ``shared`` arguments."""
        with self._guard.suspended:
            self._iteration.check_forward()
            self._enter()
        self._surveyed = list(forwards)
        self._runs.take_shared(shared)

    def run_surveyed(
        self, forward: SurveyedForward, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward of a block of such a forward."""
        with self._guard.suspended:
            if not forward.begun:
                self._begin_surveyed(forward, run)
            return self._backward_of(run, anchor, grads)

    def _begin_surveyed(self, forward: SurveyedForward, run: BlockRun) -> None:
        if self._runs.open:
            raise limits.FORWARDS.error("a forward had its backward before a later one")
        self.end()
        forward.begun = True
        self._begin_pass(self.waiting)
        self._gradients.look_up(forward.lookups)
        # Before its runs are known: what they have saved left when they ran, and nothing is to be recomputed.
        self._walk.skip_to(self._backwards[run.index][0])
        self._runs.take_surveyed(forward.runs)
        for present in (present for ref in forward.runs.values() if (present := ref()) is not None):
            for weight in self._blocks[present.index]:
                weight.uses += len(present.slices) * weight.param.requires_grad

    # -- backwards ---------------------------------------------------------------------------------------------------

    def _run_backward(self, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        # Autograd calls this, on a GPU in a thread of its own, so what is each thread's own is set here.
        with self._guard.suspended:
            self._backward.check(run)
            return self._backward_of(run, anchor, grads)

    def _run_deferred(
        self, forward: DeferredForward, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward of a block whose forward had to wait, and that forward again if this is the first."""
        with self._guard.suspended:
            self._backward.check(run)
            if not forward.passed:
                self._run_forward_again(forward)
            passed = forward.passed[run.index]
            passed.totals = run.totals
            gradients = self._backward_of(passed, anchor, grads)
            forward.runs[run.index].end()
            return gradients

    def _run_forward_again(self, forward: DeferredForward) -> None:
        if self._runs.open:
            raise limits.FORWARDS.error("a forward had its backward before a later one")
        self.end()
        self._view.begin_backward(cleared=self.manual is not None)
        self._begin_pass(self.waiting - 1)

        def again(index: int, original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[BlockRun, list[Tensor]]:
            step, presence = self._forwards[index]
            self._walk.begin(step)
            with presence:
                run = self._make_run(index, original, args, kwargs)
                if run.needs_backward:
                    out: Any = run.forward(self._anchor, [x.detach() for x in run.take_inputs()])[0]
                else:
                    out = run.run_frozen()
                self._runs.returned(out)
            self._walk.end()
            return run, tensors_of(out)

        forward.run_again(again)

    def _begin_backward(self) -> None:
        self._setup.hooks.check()
        self._view.begin_backward(cleared=self.manual is not None)
        self._iteration.begin_backward()
        if self.common is not None and self._window.which == "updating":
            with self._recorder.waiting():
                self.common.begin(beside=True)
        if self.manual is not None:
            self.manual.begin_backward(updating=self._window.which == "updating")
        # Users' hooks see gradients as other code between the backward and the step does, and weights as after it.
        self.step.enclose()

    def _backward_of(self, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        index = run.index
        step, op = self._backwards[index]
        if not self._iteration.ran_backward:
            self._begin_backward()
        if self._walk.cursor < step:
            self._walk.skip_to(step)
        self._walk.begin(step)
        again = self._walk.again(step)
        if again and not self._runs.surveyed:
            self._run_again(again)
        if run.offloader is not None:
            run.offloader.fetch(op)
        with self._presence[op]:
            self._gradients.begin_block(self._blocks[index])
            gradients = run.backward(anchor, grads)
            self._consumers.given(index, gradients, run.totals)
            self._gradients.end_block(self._blocks[index])
            self._gradients.end_backward_of(index)
        self._walk.end()
        return gradients

    def _run_again(self, ops: Sequence[Op]) -> None:
        handed: list[Tensor] | None = None
        block = -1
        for op in ops:
            if op.block != block + 1:
                handed = None
            block = op.block
            with self._presence[op.id]:
                handed = self._runs.recompute(op, self._anchor, handed)

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(self, *, shown: bool = True) -> None:
        """End a pass that adds gradients up, if there is one; ``shown``: somebody may read the sums before updates."""
        if not self._iteration.ran_backward:
            if self._walk.begun:
                self._restart()
            return
        self._complete()
        self._iteration.add()
        if self.of_all is not None and self._window.last and not self.waiting:
            self._rest_complete = True
            self.of_all.add_up(by_updates=not shown)

    def update(self, *, keep: bool) -> bool:
        """End the pass that updates; return whether there was one. ``keep``: what waiting updates use can be shown."""
        if self._iteration.ran_backward:
            self._iteration.check_step()  # a step of ours, too, must leave no forward waiting
        if self._window.which != "updating" or not self._iteration.ran_backward:
            return self._settle(keep=keep)
        self._complete()
        self.complete_rest()
        if self.common is not None:
            self.common.end()
        return True

    def complete_rest(self, *, keep: bool = False) -> None:
        """Let gradients outside the blocks be those of all processes before a step; ``keep`` is :meth:`update`'s."""
        if self.of_all is None or not self.of_all.has_rest or not self._iteration.ran_backward:
            return
        if self._window.delayed:
            self.end(shown=keep or self._gradients.square_sums is not None)
        elif self._window.which == "updating" and not self._rest_complete:
            self._rest_complete = True
            self.of_all.add_up_rest()

    def _settle(self, *, keep: bool) -> bool:
        """Carry out the updates that have waited for all gradients, or for a last backward that has not come."""
        # Norms of gradients that somebody has asked for are those of the sums, in every process.
        self.end(shown=keep or self._gradients.square_sums is not None)
        if not self._window.added:
            return False
        # Lightning ends a run of several processes whose training_step returns None.
        assert self.of_all is None or self._rest_complete, "gradients of other processes have not been added"
        self._view.adopt()
        if self.common is not None:
            self.common.begin(beside=False)
        if not self._residency.settled:
            self._residency.settle()
        self._iteration.settle()
        with self._view.kept(self._gradients) if keep else nullcontext():
            self._walk.settle("settling" if self._window.delayed else "updating")
        if self.common is not None:
            self.common.end()
        return True

    def _complete(self) -> None:
        """Go through what is left of a pass whose backward is over."""
        checks.check_reached(self._weights, self._runs)
        self._runs.clear()
        self._walk.finish()

    def _restart(self) -> None:
        """Forget a forward that no backward followed."""
        self._iteration.forget()
        self._runs.close()
        # Nobody awaits what it has fetched, and a copy that is still to come holds device memory in the next pass.
        self._recorder.device.drain()
        self.reset()
        self._residency.settled = False

    def close(self) -> None:
        """Drop every run and what it has saved."""
        self._runs.close()
        self.forget_deferred()

    def forget_deferred(self) -> None:
        """Drop forwards that wait for others."""
        self._deferred.close()
        self._surveyed = []
        if self._iteration.state is State.FORWARD and not self._walk.begun:
            self._iteration.forget()

    def reset(self) -> None:
        """Be ready for another pass, whatever has become of the present one."""
        self.step.restore()
        self._gradients.reset(self._weights)
        self._walk.cursor = 0
        if self.of_all is not None:
            self.of_all.forget()
