"""What a loop says to its engine and asks of it: micro-batches of an update, clipping, figures, another plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.errors import OverBudget
from lt_offload.execute.device.base import Device
from lt_offload.execute.device.record import EngineStats, Recorder
from lt_offload.execute.handover import Handover
from lt_offload.execute.iteration import HALFWAY, Iteration, Transition
from lt_offload.execute.memory.activations import ROUNDING
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.snapshots import HostSnapshot
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import first_changes
from lt_offload.execute.updates.clipping import RestClipping, require_positive
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.execute.updates.window import CarriedWindow, Window
from lt_offload.execute.user_code.gradient_view import GradientView
from lt_offload.execute.user_code.guard import Guard, TrackedTensor
from lt_offload.execute.user_code.step_hooks import ManualLoop
from lt_offload.model.blocks import Structure
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes


class Controls(ABC):
    """The part of an engine that is for whoever drives it."""

    model: nn.Module
    structure: Structure
    plan: Plan | None
    """What is carried out. Another may stand here whose times alone are others, as a correction makes it: walk, window
    and residency go on with the one that they were made of."""
    device: Device
    weights: list[Weight]
    updates: Updates | None
    recorder: Recorder
    residency: Residency
    installed: bool
    gradients: Gradients | None
    _window: Window
    _guard: Guard
    _gradient_view: GradientView
    _handover: Handover
    _blocks: list[list[Weight]]
    _updated_on_host: set[int]
    _grad_norm: Tensor | None
    _rest: RestClipping
    _iteration: Iteration
    _undo: list[Callable[[], None]]
    own_loop: ManualLoop | None = None
    """Follows a loop that is not ours; elsewhere :meth:`iteration` encloses every backward."""
    after_backward: Callable[[], None] | None = None
    """Is called in such a loop when gradients are shown: what is made of them takes no device memory."""
    keeps_gradients = False
    """What updates have used can be shown afterwards, in plans whose updates wait."""

    @abstractmethod
    def drain(self) -> None:
        """Make every host copy complete."""

    @abstractmethod
    def invalidate(self) -> None:
        """Forget every device copy."""

    @property
    @abstractmethod
    def _waiting(self) -> int:
        """Forwards that wait for others before their backward."""

    @abstractmethod
    def _end_pass(self) -> None:
        """End a pass that adds gradients up, if there is one."""

    @property
    def accumulate(self) -> int:
        """Micro-batches per ``optimizer.step()`` in a loop of one's own; may be set between two iterations.

        Raises:
            ConfigError: when it is set, if it is not a number of micro-batches, or in the middle of a window.
            PlanError: when it is set, if the plan is one for windows of 1.
        """
        return self._window.size

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        self._iteration.resize(count)

    @property
    def clip_value(self) -> float | None:
        """What gradients are clamped to before updates use them, as ``torch.nn.utils.clip_grad_value_`` would do.

        May be set between two iterations; None: they are left as they are.
        """
        return self.gradients.clipping.value if self.gradients is not None else None

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        assert self.gradients is not None, "training needs a plan"
        if value is not None:
            require_positive(f"clip_value={value}", value)
        self.gradients.clipping.value = value

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        parameters: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Clip the norm of the gradients, as ``torch.nn.utils.clip_grad_norm_`` would do, before ``optimizer.step()``.

        The plan has to be one whose updates wait for that: ``delayed=True``. A norm that is not finite makes every
        gradient infinite or NaN, as in plain PyTorch, unless ``error_if_nonfinite`` is set.

        Args:
            max_norm: of all gradients together.
            norm_type: of the norm.
            error_if_nonfinite: raise if the norm is not finite; nothing has been updated then.
            parameters: in the order in which the norms of their gradients are put together; None: that of the model.

        Returns:
            The norm before clipping.

        Raises:
            ConfigError: if ``max_norm`` is not more than 0.
            UnsupportedError: if updates do not wait, or gradients have been clipped already.
            RuntimeError: with ``error_if_nonfinite``, if the norm is not finite.
        """
        require_positive(f"clip_grad_norm_(max_norm={max_norm})", max_norm)
        gradients = self._complete_gradients("clip_grad_norm_")
        with self._clipping():
            self._norms_of_rest()
            params = self.model.parameters() if parameters is None else parameters
            return gradients.clipping.clip_norm(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the gradients of the present window one by one, as ``torch.nn.utils.clip_grad_value_`` would do.

        For plans with ``delayed=True``. With others :attr:`clip_value` clips those of every window.

        Raises:
            ConfigError: if ``clip_value`` is not more than 0.
            UnsupportedError: if updates do not wait.
        """
        require_positive(f"clip_grad_value_(clip_value={clip_value})", clip_value)
        gradients = self._complete_gradients("clip_grad_value_")
        with self._clipping():
            gradients.clipping.clip_each(clip_value)
            self._clip_rest(clip_value)

    def clip_rest(self) -> None:
        """Clamp the gradients of parameters outside the blocks to :attr:`clip_value`, once they are complete."""
        if self.clip_value is not None:
            with self._guard.suspended:
                self._clip_rest(self.clip_value)

    def _clip_rest(self, value: float) -> None:
        self._norms_of_rest()
        self._rest.clip_each(value)

    def _norms_of_rest(self) -> list[Tensor]:
        """Return the squared norms of gradients outside the blocks, before they were clipped, if they are asked for."""
        if self.gradients is None or self.gradients.square_sums is None:
            return []
        return self._rest.squares()

    def _complete_gradients(self, call: str) -> Gradients:
        """Return the gradients, which wait for their updates until they are complete."""
        if not self._window.delayed:
            raise limits.CLIPPING.error(f"engine.{call}() was called")
        assert self.gradients is not None
        return self.gradients

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        with self._guard.suspended:
            self._end_pass()
            with self._gradient_view.changing():
                yield

    def show_gradients(self) -> None:
        """Let ``param.grad`` be the sum of gradients of the present window so far, which may be edited.

        Raises:
            UnsupportedError: if updates do not wait.
        """
        self._complete_gradients("show_gradients")
        with self._guard.suspended:
            self._gradient_view.shown.drop()
            self._end_pass()
            self._gradient_view.shown.put()

    @contextmanager
    def showing_used_gradients(self) -> Iterator[None]:
        """Let ``param.grad`` be what the last updates have used, to be read before it is cleared."""
        with self.device.between():
            with self._guard.suspended:
                self._gradient_view.show_used()
            yield
            with self._guard.suspended:
                self._gradient_view.forget_used()

    def hide_gradients(self, *, final: bool) -> None:
        """End that, if they are shown: updates will use what ``param.grad`` is now.

        Args:
            final: nothing else is done to them before.

        Raises:
            UnsupportedError: if somebody has kept one that is to change.
        """
        with self._guard.suspended:
            self._gradient_view.hide(final=final)

    # -- loops that are not ours ---------------------------------------------------------------------------------------

    def follow(self, optimizer: Optimizer) -> None:
        """Follow a loop that is not ours: ``optimizer.step()`` ends an iteration."""
        self._iteration.manual = True
        calls = self._end_backward, lambda: self._iteration.ran_backward, self._begin_step, self.finish
        self.own_loop = ManualLoop(self._gradient_view.consumed, optimizer, *calls)
        self._undo.append(self.own_loop.remove)

    def _end_backward(self) -> None:
        """A backward of a loop that is not ours has ended."""
        self._window.micro_batches += not self._waiting
        if self._window.delayed:
            self.show_gradients()
            if self.after_backward is not None:
                self.after_backward()
            return
        if self._window.which == "accumulating":
            with self._guard.suspended:
                self._end_pass()
        else:
            self.clip_rest()
        self._gradient_view.consumed.put()

    def _begin_step(self) -> bool:
        """``optimizer.step()`` of such a loop begins; return whether there is something to update with."""
        self._iteration.enter(Transition.STEP)
        if self._window.delayed:
            with self._guard.suspended:
                self._gradient_view.begin_step_of_loop(final=self.clip_value is None)
            self.clip_rest()
        return self._iteration.begun > 0

    def _begin_in_window(self) -> None:
        """A forward of such a loop begins, and perhaps a window."""
        self._window.begin()
        if self._window.delayed:
            self._gradient_view.begin_in_window()

    def _forget_sums(self) -> None:
        self._iteration.enter(Transition.CLEAR)
        if self.gradients is not None:
            self.gradients.forget_sums()

    # -- another engine goes on ----------------------------------------------------------------------------------------

    def changed(self, optimizer: Optimizer) -> str | None:
        """Return what has changed since the engine was installed that only another plan can follow; None: nothing.

        Args:
            optimizer: the one that is in use now.
        """
        return self._handover.changed(optimizer)

    def leave_window(self, optimizer: Optimizer) -> CarriedWindow:
        """Return what the micro-batches of the present window have left, for another engine; to be closed afterwards.

        Args:
            optimizer: that will use it.

        Raises:
            UnsupportedError: if plain PyTorch would update a weight with it that is frozen now.
        """
        return self._handover.leave_window(optimizer)

    def enter_window(self, begun: CarriedWindow) -> None:
        """Go on in a window that another engine has begun."""
        self._handover.enter_window(begun)
        if begun.added:
            self.recorder.begin()

    @abstractmethod
    def finish(self) -> None:
        """End the iteration."""

    def may_be_replaced(self) -> bool:
        """Return whether another engine may go on now, between two iterations, unnoticed by users.

        It has other memory for weights and states: whoever holds some of this engine's would not see it trained.

        Raises:
            UnsupportedError: if something was changed since the last iteration that cannot be, as the next would.
        """
        return self._handover.may_be_replaced()

    def take_in(self) -> None:
        """Let host copies be what users have assigned to parameters: the engine is about to be closed.

        Raises:
            UnsupportedError: if a parameter was given other values than it can have.
        """
        self._handover.take_in()

    def may_run(self, plan: Plan) -> bool:
        """Return whether ``plan`` can do what users do beside training.

        That is: their hooks allow that it runs other blocks a second time, and its arena is large enough for forwards
        without gradients (validation), or not smaller than it was. Beside a GPU, whose updates differ from the host's
        in the last bits, it also has to leave every update where it was: numbers do not depend on clocks.
        """
        assert self.plan is not None
        return self._handover.may_run(self.plan, plan, on_gpu=self.device.torch_device.type != "cpu")

    @property
    def stats(self) -> EngineStats:
        """Figures of the last complete iteration."""
        return self.recorder.stats(self.host_bytes, None if self._grad_norm is None else float(self._grad_norm))

    @property
    def host_bytes(self) -> int:
        """RAM of the process: its own, weights, gradients, optimizer states, activations, what is set aside."""
        updates = self.updates
        states = updates.bytes(w for w in self.weights if w.index in self._updated_on_host) if updates else 0
        own = self.plan.process_bytes if self.plan is not None else 0
        return own + self.device.host_bytes + states + self.residency.snapshots.nbytes

    def _check_host(self) -> None:
        assert self.plan is not None
        used = self.host_bytes
        if used > self._host_limit(self.plan):
            raise OverBudget(
                f"training takes {format_bytes(used)} ({used} bytes) of host memory, states of the optimizer included, "
                f"more than host_memory={self.plan.host_budget_bytes}; set host_memory={used} or more and plan again"
            )

    def _host_limit(self, plan: Plan) -> int:
        return plan.host_budget_bytes + ROUNDING * len(self._blocks)

    def trace(self) -> Trace:
        """Return the last complete iteration, measured."""
        assert self.plan is not None
        return self.recorder.trace(self.plan, self.host_bytes)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Make every host copy complete, and enclose reading them: nothing else happens to them meanwhile."""
        self.drain()
        with self._guard.suspended:
            yield

    def snapshot(self, free: int) -> HostSnapshot:
        """Return the host copies as they are now, to be read by another thread while training goes on, and closed.

        To be called :meth:`at_rest`. Copies that have to be set aside for it take what the plan's host memory leaves.

        Args:
            free: bytes of RAM that the machine has left; no more is taken.
        """
        assert self.plan is not None
        order = first_changes(self.plan)
        storages = {
            storage: order.get((owned.weight.index, owned.state is not None), len(self.plan.ops))
            for storage, owned in self._guard.announced()
            if owned.state is None or self._is_changed_by_ops(owned, storage)
        }
        return self.residency.snapshots.take(storages, min(free, self.plan.host_budget_bytes - self.host_bytes))

    def _is_changed_by_ops(self, state: TrackedTensor, storage: torch.UntypedStorage) -> bool:
        """Return whether only ops change the host copy of ``state``; other states are small, such as step counters."""
        if state.weight.index in self._updated_on_host:
            return storage.nbytes() > _SMALL
        return state.state in state.weight.states.names

    @property
    def added(self) -> int:
        """How many micro-batches of the present window have been added up without an update."""
        return self._window.added

    @property
    def halfway(self) -> bool:
        """Whether some weights of the present iteration, or of one that failed, are updated and others are not."""
        return self.unfinished() == HALFWAY

    def unfinished(self) -> str | None:
        """Return why a checkpoint of now would not be complete, as a clause for people; None if it would be."""
        return self._iteration.unfinished()


_SMALL = 8
"""Bytes of one element: whoever wants such a state as it is copies it at once."""
