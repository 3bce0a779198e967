"""Hooks around ``optimizer.step()``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

_PLACE, _NAME = "torch.optim.optimizer", "wrapper"
"""Where the function is from that calls the hooks of a step, and the step."""


class StepHooks:
    """Hooks that are called once per step, also of an optimizer whose step calls that of its base class.

    Torch calls hooks around the ``step`` of every class of which there has been an optimizer, so that they would be
    called twice as soon as there has been one of the base class.

    Args:
        optimizer: whose steps they are.
        before: is called as a hook before a step.
        after: is called as a hook after it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any],
        after: Callable[..., None],
    ) -> None:
        self._optimizer = optimizer
        self._before = optimizer.register_step_pre_hook(lambda *call: before(*call) if _outermost(call[0]) else None)
        self._after = optimizer.register_step_post_hook(lambda *call: after(*call) if _outermost(call[0]) else None)

    def enclose(self) -> None:
        """Be the last hooks that are called before a step, and the first after it."""
        before: Any = self._optimizer._optimizer_step_pre_hooks
        after: Any = self._optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before.id)
        after.move_to_end(self._after.id, last=False)

    def remove(self) -> None:
        """End."""
        self._before.remove()
        self._after.remove()


def _outermost(optimizer: Optimizer) -> bool:
    """Return whether the step of ``optimizer`` whose hooks are being called is in no other step of it.

    The stack says so whatever has been raised in an earlier step, which a count would not survive.
    """
    found, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _NAME and frame.f_globals.get("__name__") == _PLACE:
            found += frame.f_locals["args"][0] is optimizer
    return found < 2
