"""``param.grad`` after a planned backward: an update has used the gradient, and a stand-in says so.

In plain PyTorch it stays until somebody clears it: a Trainer does that in its closure, after ``training_step``, and a
loop of one's own where it likes to. So the stand-ins stay until the next backward begins, and when training has ended:
a loop that goes on without ``zero_grad()`` would add to them. With None in its place ``clip_grad_norm_`` returns 0, an
edit of gradients edits nothing, and such a loop ends with other weights, without a word. The stand-in has shape, dtype
and device of a gradient. It raises on every use but printing, assignment, ``zero_grad()`` and conversions of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import DisableTorchFunctionSubclass, make_wrapper_subclass
from lt_offload.execute.memory.tensors import Weight


class ConsumedGradient(Tensor):
    """Stands for the gradient of ``weight``, which is gone."""

    label: str

    @staticmethod
    def of(weight: Weight) -> ConsumedGradient:
        """Return the stand-in for a weight's gradient."""
        host = weight.host
        return ConsumedGradient._like(host, weight.label, dtype=host.dtype, device=host.device)

    @staticmethod
    def _like(form: Tensor, label: str, *, dtype: torch.dtype, device: torch.device) -> ConsumedGradient:
        made: ConsumedGradient = make_wrapper_subclass(
            ConsumedGradient, form.shape, dtype=dtype, device=device, layout=form.layout
        )
        made.label = label
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
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(func, args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        one = args[0] if args else None
        # `model.to()` converts gradients, too, and a Trainer calls it when it ends.
        if str(func) == _CONVERSION and isinstance(one, ConsumedGradient):
            dtype, device = (kwargs or {}).get("dtype") or one.dtype, (kwargs or {}).get("device") or one.device
            return ConsumedGradient._like(one, one.label, dtype=dtype, device=device)
        raise _refusal(func, args)


_ALLOWED = {"__get__", "__set__", "__repr__", "__format__", "__str__", "__hash__"}
_ALLOWED |= {"size", "dim", "numel", "stride", "is_floating_point"}
# The compiler asks the next ones of every tensor, and of its gradient.
_ALLOWED |= {"storage_offset", "untyped_storage", "_is_view", "is_conj", "is_neg", "is_inference"}
_ALLOWED |= {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}
_ALLOWED |= {"requires_grad_", "_has_compatible_shallow_copy_type"}
"""Questions about its form, which has not changed, assignments to ``param.grad``, and conversions of a model."""
_CONVERSION = "aten._to_copy.default"


def _refusal(func: Any, args: tuple[Any, ...]) -> Exception:
    """Return the error for a call of ``func``; the gradient is among its arguments, perhaps in a list."""
    flat = [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
    label = next((item.label for item in flat if isinstance(item, ConsumedGradient)), "a weight")
    name = getattr(func, "__name__", None) or str(func)
    user = "GradScaler" if "non_finite_check_and_unscale" in name else name
    return limits.GRADIENTS.error(f"the gradient of {label} was used by {user}")
