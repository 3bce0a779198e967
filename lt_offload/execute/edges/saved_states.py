"""The optimizer's states as its ``state_dict()`` shows them, and as ``load_state_dict()`` replaces them."""

from __future__ import annotations

from collections.abc import Callable

from lt_offload import limits
from lt_offload.execute.edges.guard import Guard
from lt_offload.execute.optimizer import Updates


class SavedStates:
    """Lets states be complete when they are saved, and be taken over when they are loaded.

    Args:
        updates: knows the optimizer.
        guard: tells whether updates are halfway.
        open_forward: tells whether a forward waits for its backward.
        drain: makes every host copy complete.
        invalidate: forgets every device copy.
    """

    def __init__(
        self,
        updates: Updates,
        guard: Guard,
        open_forward: Callable[[], bool],
        drain: Callable[[], None],
        invalidate: Callable[[], None],
    ) -> None:
        self._updates, self._guard, self._open_forward = updates, guard, open_forward
        self._drain, self._invalidate = drain, invalidate
        optimizer = updates.optimizer
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._show()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._replace()),
            optimizer.register_load_state_dict_post_hook(lambda _: updates.unshare(optimizer.state.values())),
        ]

    def remove(self) -> None:
        """End."""
        for handle in self._handles:
            handle.remove()

    def _show(self) -> None:
        if self._guard.halfway:
            raise limits.HALFWAY.error("optimizer.state_dict() was called")
        self._drain()

    def _replace(self) -> None:
        if self._guard.halfway or self._open_forward():
            raise limits.DURING_FORWARD.error("optimizer.load_state_dict() was called")
        self._drain()
        self._invalidate()
        self._updates.generation += 1
