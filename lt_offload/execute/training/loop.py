"""A loop's actions between a backward and the update: it clips gradients, looks at them, edits them, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.execute.device.base import Device
from lt_offload.execute.iteration import Iteration
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.updates.clipping import RestClipping, require_positive
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.window import Window
from lt_offload.execute.user_code.gradient_view import GradientView
from lt_offload.execute.user_code.guard import Guard
from lt_offload.execute.user_code.step_hooks import ManualLoop
from lt_offload.schema.plan import ADDING


class WindowGradients:
    """The gradients of the present window, which a loop may clip, read and edit before updates use them.

    Args:
        model: whose parameters have them.
        rest: parameters outside the blocks.
        device: has some of them.
        gradients: those of the blocks.
        iteration: says where the engine is.
        passes: end before gradients are looked at.
        guard: stands before users' code.
        view: what ``param.grad`` is.
    """

    def __init__(
        self,
        model: nn.Module,
        rest: list[nn.Parameter],
        *,
        device: Device,
        gradients: Gradients,
        iteration: Iteration,
        passes: Passes,
        guard: Guard,
        view: GradientView,
    ) -> None:
        self._model, self._device, self._gradients = model, device, gradients
        self._window, self._passes, self._guard, self._view = iteration.window, passes, guard, view
        self._rest = RestClipping(rest)

    @property
    def clip_value(self) -> float | None:
        """See ``Engine.clip_value``."""
        return self._gradients.clipping.value

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        if value is not None:
            require_positive(f"clip_value={value}", value)
        self._gradients.clipping.value = value

    def begin(self, *, norm: bool) -> None:
        """An iteration begins; ``norm``: that of all gradients is asked for."""
        self._gradients.square_sums = [] if norm else None
        self._rest.begin()

    def clip_norm(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool, parameters: Iterable[Tensor] | None
    ) -> Tensor:
        """See ``Engine.clip_grad_norm_``."""
        require_positive(f"clip_grad_norm_(max_norm={max_norm})", max_norm)
        self._require_waiting("clip_grad_norm_")
        with self._clipping():
            self.norms_of_rest()
            params = self._model.parameters() if parameters is None else parameters
            clipping = self._gradients.clipping
            return clipping.clip_norm(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_each(self, value: float) -> None:
        """See ``Engine.clip_grad_value_``."""
        require_positive(f"clip_grad_value_(clip_value={value})", value)
        self._require_waiting("clip_grad_value_")
        with self._clipping():
            self._gradients.clipping.clip_each(value)
            self._clip_rest(value)

    def clip_rest(self) -> None:
        """Clamp the gradients of parameters outside the blocks to :attr:`clip_value`, once they are complete."""
        if self.clip_value is not None:
            with self._guard.suspended:
                if self._passes.of_all is not None and self._window.delayed:
                    self._passes.end()
                else:
                    self._passes.complete_rest()
                self._clip_rest(self.clip_value)

    def _clip_rest(self, value: float) -> None:
        self.norms_of_rest()
        self._rest.clip_each(value)

    def norms_of_rest(self) -> list[Tensor]:
        """Return the squared norms of gradients outside the blocks, before they were clipped, if they are asked for."""
        return [] if self._gradients.square_sums is None else self._rest.squares()

    def show(self) -> None:
        """Let ``param.grad`` be the sum of gradients of the present window so far, which may be edited.

        Raises:
            UnsupportedError: if updates do not wait.
        """
        self._require_waiting("show_gradients")
        with self._guard.suspended:
            self._view.shown.drop()
            self._passes.end()
            self._view.shown.put()

    def show_clipped(self) -> None:
        """Let ``param.grad`` be what updates will use, clipped as has been said by now, which may be edited.

        Raises:
            UnsupportedError: if updates do not wait.
        """
        self._require_waiting("show_clipped_gradients")
        with self._guard.suspended:
            self._passes.end()
            self._view.show_clipped(self._gradients.clipping.edit(now=True))

    def hide(self, *, final: bool) -> None:
        """End that, if they are shown: updates will use what ``param.grad`` is now.

        Args:
            final: nothing else is done to them before.

        Raises:
            UnsupportedError: if somebody has kept one that is to change.
        """
        with self._guard.suspended:
            self._view.hide(final=final)

    @contextmanager
    def showing_used(self) -> Iterator[None]:
        """Let ``param.grad`` be what the last updates have used, to be read before it is cleared."""
        with self._device.between():
            with self._guard.suspended:
                self._view.show_used()
            yield
            with self._guard.suspended:
                self._view.forget_used()

    def _require_waiting(self, call: str) -> None:
        """Raise ``UnsupportedError`` unless updates wait until gradients are complete."""
        if not self._window.delayed:
            raise limits.CLIPPING.error(f"engine.{call}() was called")

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        with self._guard.suspended:
            self._passes.end()
            with self._view.changing():
                yield


class LoopCalls:
    """What a loop calls, and sets, between a backward and the update."""

    _window: Window
    _iteration: Iteration
    _window_gradients: WindowGradients | None

    @property
    def window_gradients(self) -> WindowGradients:
        """The gradients of the present window, which a loop may clip, read and edit before updates use them."""
        assert self._window_gradients is not None, "training needs a plan"
        return self._window_gradients

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
        return self._window_gradients.clip_value if self._window_gradients is not None else None

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        self.window_gradients.clip_value = value

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
            parameters: all, in the order in which the norms of their gradients are put together; None: the model's.

        Returns:
            The norm before clipping.

        Raises:
            ConfigError: if ``max_norm`` is not more than 0, or ``parameters`` are not all that have a gradient.
            UnsupportedError: if updates do not wait, or gradients have been clipped already.
            RuntimeError: with ``error_if_nonfinite``, if the norm is not finite.
        """
        return self.window_gradients.clip_norm(
            max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, parameters=parameters
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the gradients of the present window one by one, as ``torch.nn.utils.clip_grad_value_`` would do.

        For plans with ``delayed=True``. With others :attr:`clip_value` clips those of every window.

        Raises:
            ConfigError: if ``clip_value`` is not more than 0.
            UnsupportedError: if updates do not wait.
        """
        self.window_gradients.clip_each(clip_value)


class FollowedLoop:
    """A loop that is not ours, in which ``optimizer.step()`` ends an iteration.

    Args:
        optimizer: whose step that is.
        after_backward: is called when gradients are shown: what is made of them takes no device memory.
        gradients: what the loop may do with them.
        iteration: says where the engine is.
        passes: are told of the loop.
        guard: stands before users' code.
        view: what ``param.grad`` is.
        finish: ends the iteration.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        after_backward: Callable[[], None],
        *,
        gradients: WindowGradients,
        iteration: Iteration,
        passes: Passes,
        guard: Guard,
        view: GradientView,
        finish: Callable[[], None],
    ) -> None:
        self._after_backward, self._gradients, self._passes = after_backward, gradients, passes
        self._iteration, self._window = iteration, iteration.window
        self._guard, self._view = guard, view
        calls = self._end_backward, self._consumed, self._begin_step, finish, view.leave
        hooks = ManualLoop(view.consumed, guard.suspended, optimizer, *calls)
        self.remove = hooks.remove
        iteration.manual, passes.manual = True, hooks

    def _end_backward(self) -> None:
        self._window.complete += not self._passes.waiting
        if self._window.delayed:
            self._gradients.show()
            self._after_backward()
            return
        if self._window.which in ADDING:
            with self._guard.suspended:
                self._passes.end()
        else:
            self._gradients.clip_rest()
        self._view.consumed.put()

    def _begin_step(self) -> bool:
        """``optimizer.step()`` begins; return whether there is something to update with."""
        self._iteration.check_step()
        with self._guard.suspended:
            self._passes.complete_rest()
        if self._window.delayed:
            with self._guard.suspended:
                self._view.begin_step_of_loop(final=self._gradients.clip_value is None)
        if not self._iteration.ran_backward:
            self._gradients.clip_rest()
        return self._iteration.begun > 0

    def _consumed(self) -> bool:
        return self._iteration.begun > 0 and not self._window.delayed
