"""Carries out a plan: the only owner of what is where. What it does is decided in ``plan/``.

The engine wraps each block's ``forward``, or its compiled call. A pass of an iteration is a forward and a backward
(``training/passes.py``). The last pass of a window updates, and :meth:`Engine.finish` ends the iteration; those before
it add gradients up. The calling thread waits for an event only where its computation reads what a copy brings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import functorch_level
from lt_offload.execute.device.base import Device
from lt_offload.execute.device.record import EngineStats, Recorder
from lt_offload.execute.iteration import HALFWAY, Iteration
from lt_offload.execute.memory.activations import HostPool
from lt_offload.execute.memory.common import Common, check_beside
from lt_offload.execute.memory.groups import Layout, move_rest
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.snapshots import Snapshots
from lt_offload.execute.memory.streaming import Streaming, room
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Program, check_match
from lt_offload.execute.training.handover import Handover
from lt_offload.execute.training.host_copies import HostCopies, host_limit
from lt_offload.execute.training.loop import LoopCalls
from lt_offload.execute.training.parts import EngineParts
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.training.survey import Survey
from lt_offload.execute.updates.clipping import RestClipping
from lt_offload.execute.updates.common_states import CommonStates
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.optimizer import Updates, updates_in_place
from lt_offload.execute.updates.others import SumsOfAll
from lt_offload.execute.updates.tables import tables_of
from lt_offload.execute.updates.window import Window
from lt_offload.execute.user_code.aliases import held_by_others
from lt_offload.execute.user_code.checks import InstalledSetup, UserHooks
from lt_offload.execute.user_code.gradient_view import GradientView
from lt_offload.execute.user_code.guard import Guard
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.execute.user_code.scaling import scaled
from lt_offload.execute.user_code.step_hooks import OptimizerStepHook, follow_states
from lt_offload.model.blocks import Structure, find_blocks
from lt_offload.model.compiled import called, intercept, without_gradients
from lt_offload.model.location import located
from lt_offload.model.state.handed import Handed
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Trace

if TYPE_CHECKING:
    from lt_offload.distributed.ranks import Ranks

_HOST = torch.device("cpu")


class Engine(LoopCalls):
    """Trains ``model`` by ``plan`` on ``device``; without a plan it streams forwards only.

    ``plan`` is one that ``lt_offload.plan.verify.check`` accepts. The engine does not close ``device``. ``others`` are
    other processes that train the same model, each with an engine of its own, made and installed at the same time:
    updates use the sums of all their gradients, and host copies are in memory that all of a machine have together.
    Updates have to wait (``delayed=True``), unless all are on the host and all processes on one machine. ``survey`` is
    what ran before the plan was made, and has no backward yet; see ``training/survey.py``. Raises ``PlanError`` if the
    plan belongs to another model, and ``UnsupportedError`` if the optimizer cannot update tensor by tensor, or lacks a
    trainable parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        plan: Plan | None,
        device: Device,
        *,
        structure: Structure | None = None,
        others: Ranks | None = None,
        survey: Survey | None = None,
    ) -> None:
        self._others, self._survey = others, survey
        self._common: Common | None = None
        self.structure = structure or find_blocks(model)
        self.model, self.device = model, device
        self.plan = plan
        """The plan that is carried out. Another may stand here whose times alone are others, as a correction makes it:
        all parts of the engine go on with the one that they were made of."""
        check_match(self.structure, optimizer, plan)
        program = self._program = Program(plan, self.structure) if plan is not None else None
        if plan is not None and optimizer is not None:
            limits.check("optimizer", limits.Setup(model=model, optimizers=[optimizer]))
        self.pool = HostPool(device)
        self.recorder = Recorder(device)
        self.weights: list[Weight] = []
        self.updates = Updates(optimizer) if optimizer is not None else None
        self.residency: Residency
        self.streaming: Streaming
        self.gradients: Gradients | None = None
        self.handover: Handover
        """The change to another engine, or from one."""
        self.keeps_gradients = False
        """Gradients that updates have used can be shown afterwards, in plans whose updates wait."""
        self.installed = False
        self._undo: list[Callable[[], None]] = []
        self._elsewhere = ExitStack()
        """Contexts in which the model runs on another device than its parameters are on."""
        repeated, parts, deferred = (
            (program.repeated, program.parts, program.deferred_forwards) if program is not None else ((), 1, 0)
        )
        self._hooks = UserHooks(self.structure, repeated, parted=parts > 1, deferred=deferred > 0)
        self._hooks.check()
        self._loss: LossInBlock | None = None
        self._blocks: list[list[Weight]] = []
        """The weights of each block."""
        self._guard: Guard
        self._stream: object
        """The stream that blocks are to be called on: the current one, until a step begins on another."""
        self._gradient_view: GradientView
        self.host_copies: HostCopies
        self._rest = RestClipping([param for _, param in self.structure.rest])
        self._window = Window()
        if program is not None:
            self._loss = LossInBlock.planned(self.structure, program.options[-1], program.chunk_tokens)
            self._window = Window(program.window, adds_up=program.adds_up, delayed=program.delayed)
        self._iteration = Iteration(
            self._window,
            lambda: self._passes is not None and self._passes.open,
            lambda: self._passes.waiting if self._passes is not None else 0,
        )
        self._accounting = ExitStack()
        """The account of the memory that the iteration takes."""
        self._grad_norm: Tensor | None = None
        """The norm on the device: nobody waits for it before somebody asks."""

    # -- life cycle --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the model over: wrap the blocks' forwards, attach gradient hooks, make the arena."""
        assert not self.installed
        device, program = self.device, self._program
        # Counted before anything below holds the weights' memory, too.
        held = held_by_others(self.model, self.structure, device.torch_device)
        self.weights = [
            Weight(i, name, param) if self._survey is None else self._survey.weight(i, name, param)
            for i, (name, param) in enumerate(self.structure.tensors)
        ]
        self._blocks = [[self.weights[t] for t in block.tensors] for block in self.structure.blocks]
        common = self._common = self._in_common(held)
        staying = held if common is None else common.staying
        groups = program.groups if program is not None else None
        layout = Layout(device, self.weights, self._blocks, groups, staying, common)
        move_rest(self.model, self.structure, device.torch_device)
        if program is not None:
            together = common.nbytes // common.machine.size if common is not None else 0
            device.limit_host(host_limit(program) - program.process_bytes - together)
        device.stays(*(param.detach() for _, param in self.structure.rest), *self.model.buffers())
        device.reserve(program.arena_bytes if program is not None else room(self._blocks, device.room))
        updates = self.updates
        known = (Snapshots(), None) if updates is None else (updates.snapshots, updates.adopt)
        self.residency = Residency(device, layout, program, *known)
        self.streaming = Streaming(device, self._blocks, layout, self.residency)
        if program is not None:
            assert updates is not None
            for index in set[int]().union(*program.read_on_host.values()):
                self.weights[index].expose(device)  # which may fail, so before blocks are wrapped
            tables = tables_of(program, self.structure.blocks[0].module, self.weights, device)
            self.gradients = Gradients(device, updates, self.weights, program, tables, common)
        self._intercept()
        unseen = [self.weights[index] for index in held]
        checks_of_use = self._iteration.check_read, self._iteration.check_write
        modes = self._survey.modes if self._survey is not None else None
        self._guard = Guard(self.weights, self.residency, updates, *checks_of_use, unseen, common, modes)
        fixed = InstalledSetup(self.structure, self.weights, updates, self._hooks)
        window = self._window, self._forget_sums
        self._gradient_view = GradientView(self.weights, self._guard, self.residency, *window)
        parts = EngineParts(
            structure=self.structure,
            weights=self.weights,
            blocks=self._blocks,
            recorder=self.recorder,
            residency=self.residency,
            iteration=self._iteration,
            guard=self._guard,
            setup=fixed,
            view=self._gradient_view,
        )
        self.handover = Handover(parts, program, staying=bool(held))
        self.host_copies = HostCopies(parts, updates, program, common)
        if updates is not None:
            self._begin_training(updates, parts)
        self._stream = device.stream()
        self._elsewhere.enter_context(located(self.model, device.torch_device))
        # Last: up to here the engine itself reads and writes weights.
        self._guard.install()
        self._survey = None
        self.installed = True

    def _intercept(self) -> None:
        runs = [self._wrapped(index, called(block.module)) for index, block in enumerate(self.structure.blocks)]
        if self._loss is not None:
            self._undo.append(self._loss.install(self._wrapped(len(runs) - 1, self._loss.module.forward)))
            runs[-1] = self._loss.deferring(runs[-1])
        for block, run in zip(self.structure.blocks, runs, strict=True):
            self._undo.append(intercept(block.module, without_gradients(block.module, run)))

    def _begin_training(self, updates: Updates, parts: EngineParts) -> None:
        """Stand around the optimizer's step, and carry the plan out if there is one."""
        step = self._watch_optimizer(updates)
        if self._program is None or self.gradients is None:
            return
        self._passes = Passes(
            parts, self._program, pool=self.pool, streaming=self.streaming, gradients=self.gradients, step=step
        )
        if self._others is not None and self._common is not None:
            # Updates use the sums of all processes' gradients, and each process carries out its part of them.
            rest, common = self.structure.rest, self._common
            sums = SumsOfAll(self._others, common, self.device, self.weights, rest, self.residency, self.recorder)
            self._passes.join(sums, CommonStates(common, updates, self.device))

    def _watch_optimizer(self, updates: Updates) -> OptimizerStepHook:
        """Let the optimizer's states be complete when they are saved, and be taken over when they are loaded."""
        on_host = self._program.updated_on_host if self._program is not None else ()
        hosted = [w.param for w in self.weights if w.states.group is not None or w.index in on_host]
        updates.move(hosted, _HOST)
        updates.move([param for _, param in self.structure.rest], self.device.torch_device)
        if self._window.delayed:
            self._elsewhere.enter_context(scaled(updates.optimizer, partial(self._unscale, updates.optimizer)))
        params = {weight.param for weight in self.weights}
        calls = self._begin_step_within, self._after_step
        step = OptimizerStepHook(updates, params, *calls, delayed=self._window.delayed)
        checks = self._iteration.check_read, self._iteration.check_write
        self._undo += [step.remove, follow_states(updates, *checks, self.drain, self.invalidate)]
        return step

    def _in_common(self, staying: Collection[int]) -> Common | None:
        if self._others is None:
            return None
        in_place = self.updates is not None and updates_in_place(self.updates.optimizer)
        if self.plan is not None and not self.plan.delayed:
            check_beside(self.plan, in_place=in_place, machines=self._others.size // self._others.machine.size)
        return Common(self._others, self.device, self.weights, self._program, staying, owned_updates=in_place)

    def remove(self) -> None:
        """Give the model back: complete weights, original forwards, no hooks. The engine cannot be used again."""
        if not self.installed:
            return
        self.installed = False
        with self._gradient_view.standing():
            self._gradient_view.discard()
        self._guard.remove()
        for undo in self._undo:
            undo()
        self._elsewhere.close()
        if self.gradients is not None:
            self.gradients.remove()
        try:
            self.drain()
        finally:
            # The model is given back whatever a lane has to report.
            if self._passes is not None:
                self._passes.close()
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

    def abort(self, error: BaseException) -> None:
        """Leave an iteration that failed: await what is in flight, drop what was saved, bring newer copies home.

        Where weights are of two steps ``error``, which the user sees, gets a note that says so.
        """
        if not self.installed:
            return
        begun = self._iteration.begun > 0
        self._iteration.fail()
        if self.halfway and HALFWAY not in getattr(error, "__notes__", ()):
            error.add_note(HALFWAY)
        with self._guard.suspended, self._gradient_view.standing(begun=begun):
            self._gradient_view.discard()
            passes = self._passes
            if passes is not None:
                passes.close()
            try:
                self.device.drain()
            finally:
                if passes is not None:
                    passes.reset()
                if self.gradients is not None:
                    self.gradients.forget_sums()
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
        passes = self.passes
        if not last:
            self._window.require()
        assert self.gradients is not None
        self.gradients.square_sums = [] if grad_norm else None
        self._rest.begin()
        self._iteration.enclosed = True
        self._stream = self.device.stream()
        self._window.begin(last=last)
        with self._guard.suspended:
            passes.forget_deferred()  # of a step that returned no loss
            self._gradient_view.begin_iteration()
        try:
            with self._accounting:
                self._accounting.enter_context(self.device.accounting(signature))
                yield
            if self._iteration.enclosed:
                self._end_step(stepped=False)
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._iteration.enclosed = False

    def _end_step(self, *, stepped: bool) -> None:
        self._iteration.enclosed = False
        self._accounting.close()
        with self._guard.suspended:
            gave = self._iteration.begun > 0
            if not self._window.last:
                self.passes.end()
            elif stepped or not self._window.delayed:
                self._finish()
            else:
                self._skip()
            if gave:
                self._gradient_view.leave()

    def _skip(self) -> None:
        """End an iteration whose step a ``GradScaler`` has left out: no update uses its gradients."""
        self.passes.end()
        self._gradient_view.adopt()
        if self.keeps_gradients:
            self._gradient_view.keep()
        self._forget_sums()
        self._grad_norm = None
        self.passes.forget_deferred()
        self._guard.end()

    def _begin_step_within(self) -> None:
        if self._iteration.manual:
            self._begin_step_of_loop()
        else:
            with self._guard.suspended:
                if self._passes is not None:
                    self._passes.complete_rest(keep=self.keeps_gradients)
                self._gradient_view.begin_step()

    def _after_step(self) -> None:
        """End the iteration before other hooks of ``optimizer.step()`` are called, which see weights as after it."""
        if self._iteration.manual:
            self._end_step_of_loop()
        elif self._iteration.enclosed and self._iteration.begun:
            self._end_step(stepped=True)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Enclose forwards without gradients, so that their memory is held against the budget."""
        self._stream = self.device.stream()
        with self.device.accounting():
            yield

    @override
    def finish(self) -> None:
        with self._guard.suspended:
            self._finish()

    def _finish(self) -> None:
        passes = self.passes
        assert self.gradients is not None and self.updates is not None
        if not passes.update(keep=self.keeps_gradients):
            return
        self._grad_norm = norm = self.gradients.end_iteration(self._norms_of_rest())
        # A GradScaler leaves it to fused optimizers to unscale gradients.
        scale = getattr(self.updates.optimizer, "grad_scale", None)
        if norm is not None and isinstance(scale, Tensor):
            self._grad_norm = norm / scale.to(norm.device)
        self.updates.end_iteration(self.weights)
        self._iteration.end()
        passes.forget_deferred()
        if self.updates.states_move or self.updates.counts:
            # Whoever looks for a state that is not there yet, or for a number, asks no tensor.
            self.updates.states_move = False
            self.device.drain()
            self.updates.order_states()
        self._guard.end()
        self.recorder.end()
        if self.recorder.iterations == 1:  # by now there are optimizer states
            self.host_copies.check()

    # -- calls of blocks ---------------------------------------------------------------------------------------------

    def _wrapped(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        block, device = self.structure.blocks[index], self.device

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if functorch_level() is not None:
                raise limits.TRANSFORMED.error(f"block {block.name} was called in a transform")
            if device.stream() is not self._stream:
                raise limits.OTHER_STREAM.error(
                    f"block {block.name} was called on another CUDA stream than its step began"
                )
            handed = Handed(args, kwargs)
            if device.torch_device.type != "cpu":
                handed.bring(block, device.torch_device)
            return handed.returned(self._run(index, handed.around(forward), handed.args, handed.kwargs))

        return wrapper

    def _run(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        with self._guard.suspended:
            if torch.is_grad_enabled():
                if self._passes is None:
                    raise limits.BACKWARD_OUTSIDE.error(
                        f"block {self.structure.blocks[index].name} was called with gradients outside the training "
                        "step, by log_graph=True of a logger perhaps"
                    )
                return self._passes.forward(index, forward, args, kwargs)
            self._iteration.check_validation()
            if self.streaming.begins(index):
                self._guard.begin()
            return self.streaming.forward(index, forward, args, kwargs)

    # -- for whoever drives it ---------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Figures of the last complete iteration."""
        return self.recorder.stats(self.host_bytes, None if self._grad_norm is None else float(self._grad_norm))

    @property
    def host_bytes(self) -> int:
        """RAM of the process: its own, weights, gradients, optimizer states, activations, what is set aside."""
        return self.host_copies.nbytes

    def trace(self) -> Trace:
        """Return the last complete iteration, measured."""
        assert self.plan is not None
        return self.recorder.trace(self.plan.budget_bytes, self.host_bytes)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Make every host copy complete, and enclose reading them: nothing else happens to them meanwhile."""
        self.drain()
        with self._guard.suspended:
            yield

    @property
    def added(self) -> int:
        """Micro-batches of the present window that have been added up without an update."""
        return self._window.added

    @property
    def halfway(self) -> bool:
        """True if some weights of the present iteration, or of one that failed, are updated and others are not."""
        return self.unfinished() == HALFWAY

    def unfinished(self) -> str | None:
        """Return why a checkpoint of now would not be complete, as a clause for people; None if it would be."""
        return self._iteration.unfinished()

    def _forget_sums(self) -> None:
        self._iteration.clear()
        if self.gradients is not None:
            self.gradients.forget_sums()
