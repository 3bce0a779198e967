"""Hooks around ``optimizer.step()``: for the user's own optimizer beside the plan, and for a user's own training loop.

The optimizer's own step finds nothing left to do, and in a loop of one's own it ends an iteration
(:class:`OptimizerStepHook`, :class:`ManualLoop`); its states are complete when they are saved (:func:`follow_states`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import after_backward, step_post_hooks_of, step_pre_hooks_of
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.model.optimizers import copied, of_parameters

_PLACE, _NAME = "torch.optim.optimizer", "wrapper"
"""Module and name of the function that calls the hooks of a step, and the step."""


class StepHooks:
    """Hooks that are called once per step, also of an optimizer whose step calls that of its base class.

    Torch calls hooks around the ``step`` of every class of which there has been an optimizer, so that they would be
    called twice as soon as there has been one of the base class. ``begin`` is called when the step proper begins: a
    closure runs forward and backward, so that it has returned.
    """

    def __init__(
        self, optimizer: Optimizer, begin: Callable[[], object], end: Callable[[], object] = lambda: None
    ) -> None:
        self._optimizer, self._begin = optimizer, begin

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._begun(optimizer, args, kwargs) if _outermost(optimizer) else None

        def after(optimizer: Optimizer, *_: object) -> None:
            if _outermost(optimizer):
                end()

        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(after)

    def _begun(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        others = {f"argument {number}": value for number, value in enumerate(args[2:], 2)} | kwargs
        extra = [name for name, value in others.items() if name != "closure" and value is not None]
        if extra:
            raise limits.STEP_ARGUMENTS.error(f"{type(optimizer).__name__}.step() was given {extra[0]}")
        if closure is None:
            self._begin()
            return None

        def run() -> Any:
            loss = closure()
            self._begin()
            return loss

        return ((args[0], run, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": run})

    def enclose(self) -> None:
        """Be the last hooks before a step and the first after it: users' hooks find every parameter in its group."""
        before: Any = step_pre_hooks_of(self._optimizer)
        after: Any = step_post_hooks_of(self._optimizer)
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
    depth, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _NAME and frame.f_globals.get("__name__") == _PLACE:
            depth += frame.f_locals["args"][0] is optimizer
    return depth < 2


class OptimizerStepHook(StepHooks):
    """Sees a step of the loop begin: remembers what updates are still to use, and may hide weights without a gradient.

    Most optimizers leave tensors without a gradient alone. Of one that does not, the groups have no weights of the
    engine while its step runs; parameters outside the blocks stay there. ``begins`` is called when the step proper
    begins, ``ended`` when it has ended, before hooks of users. ``delayed``: updates come after the step.
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
        super().__init__(updates.optimizer, self.begin, self._after_step)

    @override
    def remove(self) -> None:
        self.restore()
        super().remove()

    def restore(self) -> None:
        """Give the groups their parameters back."""
        for group, params in zip(self._updates.optimizer.param_groups, self._hidden, strict=False):
            group["params"] = params
        self._hidden = []

    def _after_step(self) -> None:
        self.restore()
        self._ended()

    def begin(self) -> None:
        """The step proper begins."""
        self._begins()
        # Updates come after the step, which may count up what they would have found before it.
        if self._delayed:
            self._updates.freeze()
        if self._updates.without_gradients and not self._hidden:
            groups = self._updates.optimizer.param_groups
            self._hidden = [group["params"] for group in groups]
            for group, params in zip(groups, self._hidden, strict=True):
                group["params"] = [param for param in params if param not in self._weights]


def follow_states(
    updates: Updates,
    check_read: Callable[[str], object],
    check_write: Callable[[str], object],
    drain: Callable[[], None],
    invalidate: Callable[[], None],
) -> Callable[[], None]:
    """Let states be complete when they are saved, and be taken over when they are loaded; return what ends that.

    ``check_read`` and ``check_write`` raise if nothing may be read or written now. ``drain`` makes every host copy
    complete, ``invalidate`` forgets every device copy.
    """
    optimizer = updates.optimizer

    def show(*_: object) -> None:
        check_read("optimizer.state_dict() was called")
        drain()

    def replace(*_: object) -> None:
        check_write("optimizer.load_state_dict() was called")
        drain()
        # After everything is home: forgetting device copies would lose what is newer of the weights, which nobody
        # replaces.
        invalidate()
        # The guard knows states by their memory, and loading gives them other memory.
        updates.generation += 1

    with ExitStack() as undo:
        undo.callback(optimizer.register_state_dict_pre_hook(show).remove)
        undo.callback(optimizer.register_load_state_dict_pre_hook(replace).remove)
        undo.callback(
            optimizer.register_load_state_dict_post_hook(lambda _: updates.unshare(of_parameters(optimizer))).remove
        )
        return undo.pop_all().close


class ManualLoop:
    """A loop that users have written: its backwards end without us, and its step finds what they have left."""

    def __init__(self, optimizer: Optimizer, end_backward: Callable[[], None]) -> None:
        self._optimizer, self._end = optimizer, end_backward
        self._options: list[dict[str, Any]] = []
        """Options of the groups, as the updates have used them; none before there are any."""

    def begin_backward(self, *, updating: bool) -> None:
        """A backward has begun; to be called from within it. ``updating``: updates are in it."""
        after_backward(self._end)
        self._options = _options(self._optimizer) if updating else []

    def check_options(self) -> None:
        """Refuse options that were changed since updates have used them; raises ``UnsupportedError`` naming one."""
        options, self._options = self._options, []
        present = _options(self._optimizer) if options else []  # without a backward no update has used any
        for index, (used, now) in enumerate(zip(options, present, strict=True)):
            for name, value in now.items():
                if name not in used or not _equal(used[name], value):
                    change = f"from {used.get(name)} to {value}"
                    raise limits.CHANGED_OPTIONS.error(f"{name} of parameter group {index} was changed {change}")


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    # A learning rate that is a tensor is changed in place, so the comparison needs a copy.
    return [copied(group) for group in optimizer.param_groups]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
