"""A loop's actions between a backward and the update: it clips gradients, looks at them, edits them, and steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.execute.device.base import Device
from lt_offload.execute.iteration import Iteration
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.updates.clipping import Clipping, RestClipping, Unscale, require_positive
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.window import Window
from lt_offload.execute.user_code.gradient_view import GradientView
from lt_offload.execute.user_code.guard import Guard
from lt_offload.execute.user_code.step_hooks import ManualLoop
from lt_offload.schema.plan import ADDING


class LoopCalls(ABC):
    """The engine as a loop sees it: gradients of the present window may be clipped, read and edited before updates."""

    model: nn.Module
    device: Device
    gradients: Gradients | None
    _rest: RestClipping
    """Gradients of parameters outside the blocks."""
    _window: Window
    _iteration: Iteration
    _guard: Guard
    _gradient_view: GradientView
    _passes: Passes | None = None
    _manual: ManualLoop | None = None
    _updating = False
    """The step of a loop that is not ours uses gradients up."""

    @property
    def passes(self) -> Passes:
        """The passes of the plan."""
        assert self._passes is not None, "training needs a plan"
        return self._passes

    @abstractmethod
    def finish(self) -> None:
        """End the iteration: every gradient has arrived, every update is done or queued."""

    @property
    def _clipping(self) -> Clipping:
        assert self.gradients is not None, "training needs a plan"
        return self.gradients.clipping

    # -- settings ----------------------------------------------------------------------------------------------------

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
        """The limit that gradients are clamped to before updates use them, as by ``torch.nn.utils.clip_grad_value_``.

        May be set between two iterations; None: they are left as they are.
        """
        return self.gradients.clipping.value if self.gradients is not None else None

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        if value is not None:
            require_positive(f"clip_value={value}", value)
        self._clipping.value = value

    # -- clipping ----------------------------------------------------------------------------------------------------

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
        require_positive(f"clip_grad_norm_(max_norm={max_norm})", max_norm)
        self._require_waiting("clip_grad_norm_")
        with self._changing():
            self._norms_of_rest()
            params = self.model.parameters() if parameters is None else parameters
            return self._clipping.clip_norm(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the gradients of the present window one by one, as ``torch.nn.utils.clip_grad_value_`` would do.

        For plans with ``delayed=True``. With others :attr:`clip_value` clips those of every window.

        Raises:
            ConfigError: if ``clip_value`` is not more than 0.
            UnsupportedError: if updates do not wait.
        """
        require_positive(f"clip_grad_value_(clip_value={clip_value})", clip_value)
        self._require_waiting("clip_grad_value_")
        with self._changing():
            self._clipping.clip_each(clip_value)
            self._clip_rest(clip_value)

    def _unscale(self, optimizer: Optimizer, unscale: Unscale, inverse: Tensor) -> bool:
        """Let ``unscale`` multiply the gradients of the present window by ``inverse``; return whether there are any."""
        view = self._gradient_view
        with self._guard.suspended:
            self.passes.end()
            with view.changing(show=True):
                return self._clipping.unscale(optimizer, unscale, inverse)

    def clip_rest(self) -> None:
        """Clamp the gradients of parameters outside the blocks to :attr:`clip_value`, once they are complete."""
        if self.clip_value is not None:
            with self._guard.suspended:
                if self.passes.of_all is not None and self._window.delayed:
                    self.passes.end()
                else:
                    self.passes.complete_rest()
                self._clip_rest(self.clip_value)

    def _clip_rest(self, value: float) -> None:
        self._norms_of_rest()
        self._rest.clip_each(value)

    def _norms_of_rest(self) -> list[Tensor]:
        """Return the squared norms of gradients outside the blocks, before they were clipped, if they are asked for."""
        assert self.gradients is not None
        return [] if self.gradients.square_sums is None else self._rest.squares()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._guard.suspended:
            self.passes.end()
            with self._gradient_view.changing():
                yield

    def _require_waiting(self, call: str) -> None:
        """Raise ``UnsupportedError`` unless updates wait until gradients are complete."""
        if not self._window.delayed:
            raise limits.CLIPPING.error(f"engine.{call}() was called")

    # -- param.grad --------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Let ``param.grad`` be the sum of the window's gradients so far, to be edited, in plans whose updates wait."""
        self._require_waiting("show_gradients")
        with self._guard.suspended:
            self._gradient_view.discard()
            self.passes.end()
            self._gradient_view.show()

    def show_clipped(self) -> None:
        """Let ``param.grad`` be what updates will use, clipped by now, to be edited, in plans whose updates wait."""
        self._require_waiting("show_clipped_gradients")
        with self._guard.suspended:
            self.passes.end()
            self._gradient_view.hide(final=False)
            self._gradient_view.show(self._clipping.edit(now=True))

    def hide(self, *, final: bool) -> None:
        """End that, if they are shown: updates will use what ``param.grad`` is now.

        Args:
            final: nothing else is done to them before.

        Raises:
            UnsupportedError: if somebody has kept one that is to change.
        """
        with self._guard.suspended:
            self._gradient_view.hide(final=final)

    @contextmanager
    def showing_used(self) -> Iterator[None]:
        """Let ``param.grad`` be what the last updates have used, to be read before it is cleared."""
        with self.device.between():
            with self._guard.suspended:
                self._gradient_view.show_used()
            yield
            with self._guard.suspended:
                self._gradient_view.forget_used()

    # -- loops that are not ours -------------------------------------------------------------------------------------

    def follow(self, optimizer: Optimizer, after_backward: Callable[[], None] = lambda: None) -> None:
        """Follow a loop that is not ours: ``optimizer.step()`` ends an iteration.

        ``after_backward`` is called when gradients are shown: what is made of them takes no device memory.
        """
        passes, view, window = self.passes, self._gradient_view, self._window

        def end_backward() -> None:
            window.complete += not passes.waiting
            if window.delayed:
                self.show()
                after_backward()
                return
            if window.which in ADDING:
                with self._guard.suspended:
                    passes.end()
            else:
                self.clip_rest()
            view.put_stand_ins()

        passes.manual = self._manual = ManualLoop(optimizer, end_backward)
        self._iteration.manual = True

    def _begin_step_of_loop(self) -> None:
        """``optimizer.step()`` begins: gradients are complete, and the optimizer, which has none to use, comes next."""
        self._iteration.check_step()
        view, delayed = self._gradient_view, self._window.delayed
        with self._guard.suspended:
            self.passes.complete_rest()
            if delayed:
                view.begin_step_of_loop(final=self.clip_value is None)
        if not self._iteration.ran_backward:
            self.clip_rest()
        self._updating = self._iteration.begun > 0
        # Every access to `param.grad` would go through the guard's modes, which have nothing to see in it.
        with self._guard.suspended:
            view.check(present=self._updating and not delayed)
            view.drop_stand_ins()
        assert self._manual is not None
        self._manual.check_options()

    def _end_step_of_loop(self) -> None:
        used, self._updating = self._updating, False
        self.finish()
        if used:
            with self._guard.suspended:
                self._gradient_view.leave()
