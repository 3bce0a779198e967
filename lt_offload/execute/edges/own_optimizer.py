"""The user's own optimizer beside the plan: its ``step()`` finds nothing left to do, its states are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.execute.edges.guard import Guard
from lt_offload.execute.edges.steps import StepHooks
from lt_offload.execute.optimizer import Updates
from lt_offload.model.optimizers import of_parameters


class EmptyStep:
    """Sees a step of the loop begin: what updates are still to use is remembered, what has no gradient may be hidden.

    Most optimizers leave tensors without a gradient alone. Of one that does not, the groups have no weights of the
    engine while its step runs; parameters outside the blocks stay there.

    Args:
        updates: of the engine.
        weights: of the engine.
        begins: is called when the step proper begins.
        ended: is called when the step has ended, before hooks of users.
        delayed: whether updates come after the step.
    """

    def __init__(
        self,
        updates: Updates,
        weights: set[nn.Parameter],
        begins: Callable[[], None],
        ended: Callable[[], None],
        *,
        delayed: bool,
    ) -> None:
        self._updates, self._weights, self._delayed = updates, weights, delayed
        self._begins, self._ended = begins, ended
        self._hidden: list[list[nn.Parameter]] = []
        self._hooks = StepHooks(updates.optimizer, self._before_step, self._after_step)

    def remove(self) -> None:
        """End."""
        self.restore()
        self._hooks.remove()

    def enclose(self) -> None:
        """Be the last that is called before the step, and the first after it: no hook of users' misses a parameter."""
        self._hooks.enclose()

    def restore(self) -> None:
        """Give the groups their parameters back."""
        for group, params in zip(self._updates.optimizer.param_groups, self._hidden, strict=False):
            group["params"] = params
        self._hidden = []

    def _after_step(self, *_: object) -> None:
        self.restore()
        self._ended()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        others = {f"argument {number}": value for number, value in enumerate(args[2:], 2)} | kwargs
        given = [name for name, value in others.items() if name != "closure" and value is not None]
        if given:
            raise limits.STEP_ARGUMENTS.error(f"{type(optimizer).__name__}.step() was given {given[0]}")
        if closure is None:
            self._begin()
            return None
        if len(args) > 1:
            return (args[0], self._following(closure), *args[2:]), kwargs
        return args, kwargs | {"closure": self._following(closure)}

    def _following(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which the step proper begins."""

        def run() -> Any:
            found = closure()
            self._begin()
            return found

        return run

    def _begin(self) -> None:
        self._begins()
        if self._delayed:
            self._updates.freeze()
        if self._updates.without_gradients and not self._hidden:
            groups = self._updates.optimizer.param_groups
            self._hidden = [group["params"] for group in groups]
            for group, params in zip(groups, self._hidden, strict=True):
                group["params"] = [param for param in params if param not in self._weights]


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
            optimizer.register_load_state_dict_post_hook(lambda _: updates.unshare(of_parameters(optimizer))),
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
