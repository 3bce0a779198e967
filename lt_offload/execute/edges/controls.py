"""What a loop says to its engine about the micro-batches of an update, and about clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor, nn

from lt_offload import limits
from lt_offload.errors import ConfigError
from lt_offload.execute.edges.guard import Guard
from lt_offload.execute.edges.window import Window
from lt_offload.execute.gradients import Gradients


class Controls(ABC):
    """The part of an engine that is for people who write loops."""

    model: nn.Module
    gradients: Gradients | None
    _window: Window
    _guard: Guard
    _ran_backward: bool

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
        self._window.resize(count, self._window.added + self._ran_backward)

    @property
    def clip_value(self) -> float | None:
        """What gradients are clamped to before updates use them, as ``torch.nn.utils.clip_grad_value_`` would do.

        May be set between two iterations; None: they are left as they are.
        """
        return self.gradients.clip_value if self.gradients is not None else None

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        assert self.gradients is not None, "training needs a plan"
        if value is not None and not value > 0:
            raise ConfigError(f"clip_value={value} must be more than 0, or None to leave gradients as they are")
        self.gradients.clip_value = value

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        parameters: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Clip the norm of the gradients, as ``torch.nn.utils.clip_grad_norm_`` would do, before ``optimizer.step()``.

        The plan has to be one whose updates wait for that: ``delayed=True``.

        Args:
            max_norm: of all gradients together.
            norm_type: of the norm.
            error_if_nonfinite: raise if the norm is not finite; nothing has been updated then.
            parameters: in the order in which the norms of their gradients are put together; None: that of the model.

        Returns:
            The norm before clipping.

        Raises:
            UnsupportedError: if updates do not wait, or gradients have been clipped already.
            RuntimeError: with ``error_if_nonfinite``, if the norm is not finite.
        """
        if not self._window.delayed:
            raise limits.CLIPPING.error("engine.clip_grad_norm_() was called")
        assert self.gradients is not None
        with self._guard.suspended:
            self._end_pass()
            params = self.model.parameters() if parameters is None else parameters
            return self.gradients.clip_norm(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @property
    def added(self) -> int:
        """How many micro-batches of the present window have been added up without an update."""
        return self._window.added
