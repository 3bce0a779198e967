"""What ``param.grad`` holds after a planned backward: a gradient that an update has consumed, and that says so.

In plain PyTorch it stays until somebody clears it: a Trainer does that in its closure, after ``training_step``, and a
loop of one's own where it likes to. So the stand-ins stay until the next backward begins, too.

With None in its place ``clip_grad_norm_`` returns 0 and an edit of gradients edits nothing, without a word. The
stand-in has shape, dtype and device of a gradient and raises on every use but printing, assignment and ``zero_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_offload import limits
from lt_offload.execute.edges.steps import StepHooks
from lt_offload.execute.tensors import Weight


class ConsumedGradient(Tensor):
    """Stands for the gradient of ``weight``, which is gone."""

    label: str

    @staticmethod
    def of(weight: Weight) -> ConsumedGradient:
        """Return the stand-in for a weight's gradient."""
        host = weight.host
        made: ConsumedGradient = Tensor._make_wrapper_subclass(
            ConsumedGradient, host.shape, dtype=host.dtype, device=host.device, layout=host.layout
        )
        made.label = weight.label
        return made

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient({self.label}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(func, args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _refusal(func, args)


_ALLOWED = {"__get__", "__set__", "__repr__", "__format__", "__str__", "__hash__"}
_ALLOWED |= {"size", "dim", "numel", "stride", "is_floating_point"}
"""Questions about its form, which has not changed, and assignments to ``param.grad``."""


def _refusal(func: Any, args: tuple[Any, ...]) -> Exception:
    """Return the error for a call of ``func``; the gradient is among its arguments, perhaps in a list."""
    flat = [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
    label = next((item.label for item in flat if isinstance(item, ConsumedGradient)), "a weight")
    name = getattr(func, "__name__", None) or str(func)
    return limits.GRADIENTS.error(f"the gradient of {label} was used by {name}")


class StandIns:
    """The consumed gradients of a model's trainable weights, put in place and taken away."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._items = [(w.param, ConsumedGradient.of(w), w.label) for w in weights if w.param.requires_grad]
        self._awaited = False
        """They were put in place, and nobody has looked yet what has become of them."""

    def put(self) -> None:
        """Let every trainable weight have a consumed gradient."""
        self._awaited = True
        for param, grad, _ in self._items:
            param.grad = grad

    def drop(self) -> None:
        """Let none have one."""
        self._awaited = False
        for param, grad, _ in self._items:
            if param.grad is grad:
                param.grad = None

    @property
    def gone(self) -> bool:
        """Whether none of them is there any more, as after ``zero_grad()``."""
        return all(param.grad is None for param, _, _ in self._items)

    def check(self, *, present: bool) -> None:
        """Check that all of them are there still, or none.

        Raises:
            UnsupportedError: naming a weight.
        """
        for param, grad, label in self._items:
            if (param.grad is grad) is not present:
                what = "removed or replaced before" if present else "to be used a second time by"
                raise limits.GRADIENTS.error(f"the gradient of {label} was {what} optimizer.step()")

    def give_way(self, *, adding: bool, cleared: bool) -> None:
        """A backward begins, which gives new gradients.

        Args:
            adding: to those that the stand-ins stand for.
            cleared: otherwise those have to have been cleared.

        Raises:
            UnsupportedError: if there are some to add to that are gone, or others that were not cleared.
        """
        if self._awaited and (adding or cleared):
            self.check(present=adding)
        self.drop()


class OwnLoop:
    """Follows a training loop that users have written, by the hooks of ``optimizer.step()``.

    Args:
        gradients: what parameters hold after a backward.
        optimizer: whose step ends an iteration.
        end_backward: is called at the end of each backward.
        begin_step: is called when a step begins; returns whether there is something to update with.
        finish: ends an iteration.
    """

    def __init__(
        self,
        gradients: StandIns,
        optimizer: Optimizer,
        end_backward: Callable[[], None],
        begin_step: Callable[[], bool],
        finish: Callable[[], None],
    ) -> None:
        self._gradients = gradients
        self._end, self._begin_step, self._finish = end_backward, begin_step, finish
        self._ran_backward = False
        self._used = False
        """The step uses gradients up."""
        self._optimizer = optimizer
        self._options: list[dict[str, Any]] = []
        """Of the groups, as the updates have used them."""
        self._hooks = StepHooks(optimizer, self._before_step, self._after_step)

    def remove(self) -> None:
        """End."""
        self._hooks.remove()

    def begin_backward(self, *, updating: bool) -> None:
        """A backward has begun; to be called from within it. ``updating``: the step follows it."""
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not updating:
            return
        self._ran_backward = True
        self._options = _options(self._optimizer)
        # Users' hooks see gradients as other code between the backward and the step does, and weights as after it.
        self._hooks.enclose()

    def _end_backward(self) -> None:
        self._end()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begin()
            return None

        def ending() -> Any:
            loss = closure()
            self._begin()
            return loss

        return (args[0], ending), {}

    def _begin(self) -> None:
        """Gradients are complete, and the optimizer, which has none to use, comes next."""
        self._used = self._begin_step()
        self._gradients.check(present=self._ran_backward)
        self._gradients.drop()
        self._check_options()

    def _check_options(self) -> None:
        if not self._ran_backward:
            return
        for index, (used, now) in enumerate(zip(self._options, _options(self._optimizer), strict=True)):
            for name, value in now.items():
                if name not in used or not _equal(used[name], value):
                    change = f"from {used.get(name)} to {value}"
                    raise limits.CHANGED_OPTIONS.error(f"{name} of parameter group {index} was changed {change}")

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        used, self._used, self._ran_backward = self._used, False, False
        self._finish()
        if used:
            self._gradients.put()


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in groups]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
