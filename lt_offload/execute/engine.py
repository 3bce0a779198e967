"""Carries out a plan: the only owner of what is where. What it does is decided in ``plan/``.

The engine wraps each block's ``forward``, or its compiled call. The first block's forward with gradients begins a pass,
the backward of the first block ends it. The last pass of a window updates, and :meth:`Engine.finish` ends the
iteration; those before it add gradients up. Every step issues its prefetches, runs its computation, then issues what
follows, exactly in the order of the plan. The calling thread waits for an event only where its computation reads what a
copy brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.torch import functorch_level
from lt_offload.errors import UnsupportedError
from lt_offload.execute.blocks.deferred import DeferredForward, DeferredForwards
from lt_offload.execute.blocks.run import BlockFunction, BlockRun
from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.controls import Controls
from lt_offload.execute.device.base import Device
from lt_offload.execute.device.record import Recorder
from lt_offload.execute.handover import Handover
from lt_offload.execute.iteration import Iteration, State, Transition
from lt_offload.execute.memory.activations import HostPool
from lt_offload.execute.memory.bound_weights import BoundWeights, expose
from lt_offload.execute.memory.groups import Layout, move_rest
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.snapshots import Snapshots
from lt_offload.execute.memory.streaming import Streaming, room
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Walk, check_match
from lt_offload.execute.updates.clipping import RestClipping
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.execute.user_code import checks
from lt_offload.execute.user_code.aliases import held_by_others
from lt_offload.execute.user_code.checks import Backward, Consumers, InstalledSetup, OwnParameters
from lt_offload.execute.user_code.gradient_view import GradientView
from lt_offload.execute.user_code.guard import Guard
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.execute.user_code.param_grad import ConsumedGradients, ShownGradients
from lt_offload.execute.user_code.place import Place
from lt_offload.execute.user_code.step_hooks import OptimizerStepHook, SavedStates
from lt_offload.model.blocks import Structure, find_blocks
from lt_offload.model.calls import tensors_of
from lt_offload.model.compiled import called, intercept, without_gradients
from lt_offload.model.location import located
from lt_offload.schema.plan import Plan

_HOST = torch.device("cpu")


class Engine(Controls):
    """Trains ``model`` by ``plan`` on ``device``; without a plan it streams forwards only.

    Args:
        model: any module with a block sequence (see ``find_blocks``).
        optimizer: the user's optimizer over the model's parameters; None for forward-only use.
        plan: a plan that ``lt_offload.plan.verify.check`` accepts; None for forward-only use.
        device: where blocks run; the engine does not close it.
        structure: the model's block sequence, if the caller has it already.

    Raises:
        PlanError: if the plan belongs to another model.
        UnsupportedError: if the optimizer cannot update tensor by tensor, or lacks a trainable parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        plan: Plan | None,
        device: Device,
        *,
        structure: Structure | None = None,
    ) -> None:
        self.structure = structure or find_blocks(model)
        self.model, self.plan, self.device = model, plan, device
        check_match(self.structure, optimizer, plan)
        if plan is not None and optimizer is not None:
            limits.check("optimizer", limits.Setup(model=model, optimizers=[optimizer]))
        self.pool = HostPool(device)
        self.recorder = Recorder(device)
        self.weights: list[Weight] = []
        self.updates = Updates(optimizer) if optimizer is not None else None
        self.residency: Residency
        self.streaming: Streaming
        self.gradients: Gradients | None = None
        self.installed = False
        self._undo: list[Callable[[], None]] = []
        ops = plan.ops if plan is not None else ()
        self._computing = {op.step: op.id for op in ops if op.computes and op.save is None}
        """By step: its forward or backward."""
        self._elsewhere = ExitStack()
        """While the model runs on another device than its parameters are on."""
        self._anchor = torch.zeros((), requires_grad=True)
        self._runs = BlockRuns(device, self.pool, self.structure, plan)
        checks.check_hooks(self.structure, self._runs.repeated, parted=self._runs.parted)
        self._loss = LossInBlock(self.structure, plan) if plan is not None and LossInBlock.wanted(plan) else None
        self._walk: Walk
        self._blocks: list[list[Weight]] = []
        """The weights of each block."""
        self._updated_on_host: set[int] = set()
        """Tensors."""
        self._presence: dict[int, BoundWeights] = {}
        """By computation."""
        self._guard: Guard
        self._place: Place
        self._fixed: InstalledSetup
        self._gradient_view: GradientView
        self._own: list[OwnParameters]
        self._handover: Handover
        self._backward = Backward(self._anchor)
        self._consumers = Consumers(lambda index: self.structure.blocks[index].name, self._runs.uses)
        self._deferred: DeferredForwards | None = None
        self._iteration = Iteration(plan, lambda: self._runs.open, lambda: self._waiting)
        self._window = self._iteration.window
        self._rest = RestClipping([param for _, param in self.structure.rest])
        self._accounting = ExitStack()
        """Of the memory that the iteration takes."""
        self._step: OptimizerStepHook
        self._grad_norm: Tensor | None = None
        """On the device: nobody waits for it before somebody asks."""

    # -- life cycle --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the model over: wrap the blocks' forwards, attach gradient hooks, make the arena."""
        assert not self.installed
        device, plan = self.device, self.plan
        # Counted before anything below holds the weights' memory, too.
        aliases = held_by_others(self.model, self.structure, device.torch_device)
        self.weights = [Weight(i, name, param) for i, (name, param) in enumerate(self.structure.tensors)]
        self._blocks = [[self.weights[t] for t in block.tensors] for block in self.structure.blocks]
        layout = Layout(device, self.weights, self._blocks, plan, aliases.held)
        move_rest(self.model, self.structure, device.torch_device)
        if plan is not None:
            device.limit_host(self._host_limit(plan) - plan.process_bytes)
        device.stays(*(param.detach() for _, param in self.structure.rest), *self.model.buffers())
        device.reserve(plan.arena_bytes if plan is not None else room(self._blocks, device.room))
        updates = self.updates
        known = (Snapshots(), None) if updates is None else (updates.snapshots, updates.adopt)
        self.residency = Residency(device, layout, plan, *known)
        self.streaming = Streaming(device, self._blocks, layout, self.residency)
        if plan is not None:
            assert self.updates is not None
            self._updated_on_host = {t for op in plan.ops if op.updates_on_host for t in plan.tensors(op)}
            expose(self.weights, plan, device)
            self.gradients = Gradients(device, self.updates, self.weights, plan)
            self._presence = {
                op.id: BoundWeights(device, self._blocks[op.block], op, plan) for op in plan.ops if op.computes
            }
            self._deferred = DeferredForwards(plan, self._runs, self.streaming, self._blocks, self._consumers.watch)
            self._walk = Walk(
                plan,
                self.weights,
                residency=self.residency,
                gradients=self.gradients,
                runs=self._runs,
                recorder=self.recorder,
            )
        runs = [self._wrapped(index, called(block.module)) for index, block in enumerate(self.structure.blocks)]
        if self._loss is not None:
            self._undo.append(self._loss.install(self._wrapped(len(runs) - 1, self._loss.forward)))
            runs[-1] = self._loss.deferring(runs[-1])
        for block, run in zip(self.structure.blocks, runs, strict=True):
            self._undo.append(intercept(block.module, without_gradients(block.module, run)))
        unseen = [self.weights[index] for index in aliases.unseen]
        self._guard = Guard(self.weights, self.residency, self.updates, self._check_read, self._check_write, unseen)
        self._fixed = InstalledSetup(self.structure, self.weights, self.updates, self._runs.repeated, self._runs.parted)
        shown = ShownGradients(self.weights, self._guard, self.residency)
        self._gradient_view = GradientView(ConsumedGradients(self.weights), shown, self._window, self._forget_sums)
        self._handover = Handover(
            self.structure,
            self.weights,
            self._blocks,
            residency=self.residency,
            iteration=self._iteration,
            guard=self._guard,
            setup=self._fixed,
            view=self._gradient_view,
            staying=bool(aliases.held),
        )
        self._own = [OwnParameters(block.name, block.module) for block in self.structure.blocks]
        self._watch_optimizer()
        self._place = Place(device)
        self._elsewhere.enter_context(located(self.model, device.torch_device))
        # Last: up to here the engine itself reads and writes weights.
        self._guard.install()
        self.installed = True

    def _watch_optimizer(self) -> None:
        """Let the optimizer's states be complete when they are saved, and be taken over when they are loaded."""
        if self.updates is None:
            return
        hosted = [w.param for w in self.weights if w.states.group is not None or w.index in self._updated_on_host]
        self.updates.move(hosted, _HOST)
        self.updates.move([param for _, param in self.structure.rest], self.device.torch_device)
        params = {weight.param for weight in self.weights}
        calls = self._begin_step_within, self._after_step
        self._step = OptimizerStepHook(self.updates, params, *calls, delayed=self._window.delayed)
        saved = SavedStates(self.updates, self._check_read, self._check_write, self.drain, self.invalidate)
        self._undo += [self._step.remove, saved.remove]

    def remove(self) -> None:
        """Give the model back: complete weights, original forwards, no hooks. The engine cannot be used again."""
        if not self.installed:
            return
        self.installed = False
        self._gradient_view.shown.drop()
        self._guard.remove()
        self._gradient_view.consumed.drop()
        for undo in self._undo:
            undo()
        self._elsewhere.close()
        if self.gradients is not None:
            self.gradients.remove()
        try:
            self.drain()
        finally:
            # The model is given back whatever a lane has to report.
            self._runs.close()
            self._forget_deferred()
            for weight in self.weights:
                weight.param.data = weight.host
            self.residency.close()
            self.streaming.close()
            if self.updates is not None:
                self.updates.close()
                self.updates.move([param for _, param in (*self.structure.tensors, *self.structure.rest)], _HOST)
            if self._grad_norm is not None:
                self._grad_norm = self._grad_norm.cpu()  # ``stats`` may be asked for it later
            move_rest(self.model, self.structure, _HOST)

    close = remove

    def drain(self) -> None:
        """Make every host copy complete: updates in flight are awaited, newer device copies written back (and kept)."""
        with self._guard.suspended:
            self.residency.complete_host()

    def invalidate(self) -> None:
        """Forget every device copy: the host copies have been changed from outside (``load_state_dict``)."""
        with self._guard.suspended:
            self.residency.forget()

    def abort(self) -> None:
        """Leave an iteration that failed: await what is in flight, drop what was saved, bring newer copies home."""
        if not self.installed:
            return
        self._iteration.enter(Transition.FAIL)
        with self._guard.suspended:
            self._gradient_view.shown.drop()
            self._runs.close()
            self._forget_deferred()
            try:
                self.device.drain()
            finally:
                self._reset()
                if self.gradients is not None:
                    self.gradients.forget_sums()
                self._gradient_view.consumed.drop()
                for weight in self.weights:
                    weight.param.data, weight.param.grad = weight.host, None
                self.residency.run_releases()
                self.residency.evict()
                self.device.drain()  # a logger's finalize() reads weights next

    # -- iterations --------------------------------------------------------------------------------------------------

    @contextmanager
    def iteration(self, *, grad_norm: bool = False, signature: object = None, last: bool = True) -> Iterator[None]:
        """Enclose forward, backward and ``optimizer.step()`` of one iteration.

        Args:
            grad_norm: compute the global gradient norm (one more pass over the gradients).
            signature: shapes of the batch; see ``Device.accounting``.
            last: False encloses forward and backward of a micro-batch that others of the same window follow.

        Raises:
            PlanError: if it is not the last one and the plan is one for windows of 1.
        """
        assert self.gradients is not None, "training needs a plan"
        if not last:
            self._window.require()
        self.gradients.square_sums = [] if grad_norm else None
        self._rest.begin()
        self._iteration.enclosed = True
        self._place.begin()
        self._window.begin(last=last)
        with self._guard.suspended:
            self._forget_deferred()  # of a step that returned no loss
            self._gradient_view.begin_iteration()
        try:
            with self._accounting:
                self._accounting.enter_context(self.device.accounting(signature))
                yield
            if self._iteration.enclosed:
                self._end_step()
        except BaseException:
            self.abort()
            raise
        finally:
            self._iteration.enclosed = False

    def _end_pass(self) -> None:
        """End a pass that adds gradients up."""
        if not self._iteration.ran_backward:
            if self._walk.begun:
                self._restart()
            return
        checks.check_reached(self.weights, self._runs)
        self._runs.clear()
        self._walk.finish()
        self._iteration.enter(Transition.ADD)

    def _end_step(self) -> None:
        self._iteration.enclosed = False
        self._accounting.close()
        with self._guard.suspended:
            gave = self._iteration.begun > 0
            self._finish() if self._window.last else self._end_pass()
            if gave:
                self._gradient_view.leave()

    def _begin_step_within(self) -> None:
        if self.own_loop is None:
            with self._guard.suspended:
                self._gradient_view.begin_step()

    def _after_step(self) -> None:
        """End the iteration before other hooks of ``optimizer.step()`` are called, which see weights as after it."""
        if self._iteration.enclosed and self._iteration.begun:
            self._end_step()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Enclose forwards without gradients, so that their memory is held against the budget."""
        self._place.begin()
        with self.device.accounting():
            yield

    def finish(self) -> None:
        """End the iteration: every gradient has arrived, every update is done or queued."""
        with self._guard.suspended:
            self._finish()

    def _finish(self) -> None:
        assert self.gradients is not None and self.updates is not None
        if self._window.delayed:
            self._end_pass()
            if not self._window.added:
                return
            self._gradient_view.shown.take()
            if not self.residency.settled:
                self.residency.settle()
            self._iteration.enter(Transition.SETTLE)
            with self._gradient_view.kept(self.gradients, self.residency) if self.keeps_gradients else nullcontext():
                self._walk.settle()
        elif not self._iteration.ran_backward:
            self._iteration.enter(Transition.UPDATED)
            self._restart()
            return
        else:
            self._iteration.check(Transition.STEP)  # a step of ours, too, must leave no forward waiting
            self._walk.finish()
            checks.check_reached(self.weights, self._runs)
            self._runs.clear()
        self._grad_norm = self.gradients.end_iteration(self._norms_of_rest())
        self.updates.end_iteration(self.weights)
        self._iteration.enter(Transition.UPDATED)
        self._forget_deferred()
        if self.updates.states_move or self.updates.counts:
            # Whoever looks for a state that is not there yet, or for a number, asks no tensor.
            self.updates.states_move = False
            self.device.drain()
            self.updates.order_states()
        self._guard.end()
        self.recorder.end()
        if self.recorder.iterations == 1:  # by now there are optimizer states
            self._check_host()

    # -- one block ---------------------------------------------------------------------------------------------------

    def _wrapped(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if functorch_level() is not None:
                raise limits.TRANSFORMED.error(f"block {self.structure.blocks[index].name} was called in a transform")
            args, kwargs = self._place.enter(self.structure.blocks[index], args, kwargs)
            with self._guard.suspended:
                if torch.is_grad_enabled():
                    return self._train_forward(index, forward, args, kwargs)
                return self._stream_forward(index, forward, args, kwargs)

        return wrapper

    def _stream_forward(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        self._iteration.enter(Transition.VALIDATION)
        if index == 0:
            self._guard.begin()
        return self.streaming.forward(index, forward, args, kwargs)

    def _train_forward(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if self.plan is None:
            raise UnsupportedError("this engine has no plan: it runs forwards under torch.no_grad() only")
        deferred = self._deferred
        assert deferred is not None
        if index == 0:
            self._begin_micro_batch()
            self._begin_deferred() if deferred.due else self._begin_pass(self._waiting)
        if not (deferred.awaits(index) if deferred.running else self._walk.awaits("forward", index)):
            raise UnsupportedError(
                f"block {self.structure.blocks[index].name} was called where {self._walk.expected} was expected; "
                "lt_offload needs every block to be called once per forward, in order"
            )
        limits.check_call(self.structure.blocks[index].name, kwargs)
        self._own[index].check()
        if deferred.running:
            return deferred.forward(index, forward, args, kwargs, self._anchor, self._run_deferred)
        with self._computed(index):
            run = self._make_run(index, forward, args, kwargs)
            # Else this frame would hold the block's inputs through its forward, which the run may let go of.
            del args, kwargs
            if run.needs_backward:
                inputs = run.take_inputs()
                self._consumers.watch(index, inputs)
                out = BlockFunction.apply(run, self._anchor, self._run_backward, *inputs)  # type: ignore[no-untyped-call]
                out = run.unflatten(out)
            else:
                out = run.run_frozen()
            self._runs.returned(out)
        return out

    @contextmanager
    def _computed(self, index: int) -> Iterator[None]:
        """Enclose a forward of the present pass, for which the block's weights are in their places."""
        step = self._walk.timeline.forward(index)
        self._walk.begin(step)
        with self._presence[self._computing[step]]:
            yield
        self._walk.end()

    def _make_run(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> BlockRun:
        run = self._runs.make(index, forward, self._blocks[index], args, kwargs)
        if run.needs_backward:
            for weight in self._blocks[index]:
                weight.uses += len(run.parts) * weight.param.requires_grad
        return run

    def _run_backward(self, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        # Autograd calls this, on a GPU in a thread of its own, so what is each thread's own is set here.
        with self._guard.suspended:
            self._backward.check(run)
            if not self._iteration.ran_backward:
                self._begin_backward()
            return self._backward_of(run, anchor, grads)

    def _run_deferred(
        self, forward: DeferredForward, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward of a block whose forward had to wait, and that forward again if this is the first."""
        with self._guard.suspended:
            self._backward.check(run)
            if not forward.passed:
                self._run_forward_again(forward)
            if not self._iteration.ran_backward:
                self._begin_backward()
            passed = forward.passed[run.index]
            passed.totals = run.totals
            found = self._backward_of(passed, anchor, grads)
            forward.runs[run.index].end()
            return found

    def _run_forward_again(self, forward: DeferredForward) -> None:
        assert self._deferred is not None
        if self._runs.open:
            raise limits.FORWARDS.error("a forward had its backward before a later one")
        self._end_pass()
        self._gradient_view.begin_backward(cleared=self.own_loop is not None)
        self._begin_pass(self._deferred.waiting - 1)

        def again(index: int, original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[BlockRun, list[Tensor]]:
            with self._computed(index):
                run = self._make_run(index, original, args, kwargs)
                if run.needs_backward:
                    out: Any = run.forward(self._anchor, [x.detach() for x in run.take_inputs()])[0]
                else:
                    out = run.run_frozen()
                self._runs.returned(out)
            return run, tensors_of(out)

        self._deferred.run_again(forward, again)

    def _begin_backward(self) -> None:
        self._fixed.check_hooks()
        self._gradient_view.begin_backward(cleared=self.own_loop is not None)
        self._iteration.enter(Transition.BACKWARD)
        # Both move their hooks to the end of those of ``optimizer.step()``: the last to do so encloses the other.
        if self.own_loop is not None:
            self.own_loop.begin_backward(updating=self._window.which == "updating")
        self._step.enclose()

    def _backward_of(self, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        assert self.gradients is not None
        index = run.index
        step = self._walk.timeline.backward(index)
        self._walk.skip_to(step)
        self._walk.begin(step)
        self._run_again(step)
        op = self._computing[step]
        if run.offloader is not None:
            run.offloader.fetch(op)
        with self._presence[op]:
            self.gradients.begin_block(self._blocks[index])
            found = run.backward(anchor, grads)
            self._consumers.given(index, found, run.totals)
            self.gradients.end_block(self._blocks[index])
        self._walk.end()
        return found

    def _run_again(self, step: int) -> None:
        """Run the forwards again that the plan wants before the backward of ``step``."""
        handed: list[Tensor] | None = None
        block = -1
        for op in self._walk.again(step):
            if op.block != block + 1:
                handed = None
            block = op.block
            with self._presence[op.id]:
                handed = self._runs.recompute(op, self._anchor, handed)

    def _begin_micro_batch(self) -> None:
        """A forward begins; others of the same micro-batch may wait for their backward."""
        # Only asked: the state changes when what an earlier forward has left is cleaned up.
        self._iteration.check(Transition.FORWARD)
        if self._walk.begun or self._runs:
            self._restart()
        self._guard.check_thread()
        self._fixed.check()
        self._guard.begin()
        if self.own_loop is not None and not self._waiting:
            self._begin_in_window()

    def _begin_deferred(self) -> None:
        assert self._deferred is not None
        if not self._window.added and not self._waiting:
            self.recorder.begin()
        self._iteration.enter(Transition.FORWARD)
        self._deferred.begin()

    def _begin_pass(self, waiting: int) -> None:
        """A pass begins; so many of the same micro-batch follow it."""
        self._window.begin_pass(waiting)
        self._iteration.enter(Transition.FORWARD)
        self._walk.start(self._window.which)
        if not self.residency.settled:
            self.residency.settle()
        for weight in self.weights:
            weight.uses = 0
        if not self._window.added and not self._waiting:
            self.recorder.begin()

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> int:
        """Forwards that wait for others before their backward."""
        return self._deferred.waiting if self._deferred is not None else 0

    def _check_read(self, use: str) -> None:
        self._iteration.check(Transition.READ, use)

    def _check_write(self, use: str) -> None:
        self._iteration.check(Transition.WRITE, use)

    def _forget_deferred(self) -> None:
        if self._deferred is not None:
            self._deferred.close()
            if self._iteration.state is State.FORWARD and not self._walk.begun:
                self._iteration.enter(Transition.FORGET)

    def _restart(self) -> None:
        """Forget a forward that no backward followed."""
        self._iteration.enter(Transition.FORGET)
        self._runs.close()
        self._reset()
        self.residency.unsettle()

    def _reset(self) -> None:
        if self.gradients is not None:
            self._step.restore()
            self.gradients.reset(self.weights)
            self._walk.cursor = 0
