"""The last block together with the loss, and what users find in place of logits then.

Under the options that compute the loss in the last block, its call only notes what it was given: the block runs when
the model calls its loss. Until then, and in the model's result, a stand-in has shape, dtype and device of the logits.
Those never all exist, or gradients take their place, so that every other use of it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import DisableTorchFunctionSubclass, make_wrapper_subclass
from lt_offload.errors import PlanError
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import Forward
from lt_offload.model.head import (
    LOSS_ARGUMENTS,
    HeadLoss,
    Scaling,
    asks_form,
    intercept_loss,
    scaling_step,
    suits,
    uses_causal_loss,
)
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import WITH_LOSS


class DeferredLogits(Tensor):
    """Stands for logits that are not computed as a whole."""

    hidden: Tensor | None
    """The hidden states that they would be made of, until the loss has taken them."""
    scaling: Scaling
    """What the model has done to them since."""

    @staticmethod
    def of(hidden: Tensor, vocabulary: int, scaling: Scaling = ()) -> DeferredLogits:
        """Return the stand-in for the projection of ``hidden`` after ``scaling``."""
        made: DeferredLogits = make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], vocabulary), dtype=hidden.dtype, device=hidden.device
        )
        made.hidden, made.scaling = hidden, scaling
        return made

    def hand_over(self) -> Tensor:
        """Return the hidden states, once.

        Raises:
            UnsupportedError: the second time.
        """
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise _refusal("a second loss")
        return hidden

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits({list(self.shape)})"

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _SHOWN or asks_form(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        logits, step = args[0] if args else None, scaling_step(func, args, kwargs or {})
        if step is not None and isinstance(logits, DeferredLogits) and logits.hidden is not None:
            return DeferredLogits.of(logits.hand_over(), logits.shape[-1], (*logits.scaling, step))
        raise _refusal(name or str(func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Calls from C++ come here without having passed `__torch_function__`.
        raise _refusal(str(func))


_SHOWN = {"__repr__", "__format__", "__str__", "__hash__"}


def _refusal(use: str) -> Exception:
    return limits.LOGITS.error(f"the logits of a training forward were used by {use}")


class LossInBlock:
    """Lets the last block of ``structure`` run when the model calls its loss, as ``plan`` wants it.

    Raises:
        PlanError: if the model computes its loss in another way, or without the block.
    """

    def __init__(self, structure: Structure, plan: Plan) -> None:
        block = structure.blocks[-1]
        owner, head = structure.owner, block.module
        if owner is None or not suits(head) or not uses_causal_loss(owner):
            raise PlanError(
                f"the plan computes the loss in block {block.name} (option {plan.options[-1]!r}), but the model does "
                "not take ForCausalLMLoss of a plain nn.Linear; plan again"
            )
        assert type(head) is nn.Linear
        self._owner, self._head = owner, head
        self.forward: Forward = HeadLoss(head, plan.chunk_tokens).forward
        """The block and the loss."""

    @staticmethod
    def wanted(plan: Plan) -> bool:
        """Return whether ``plan`` computes the loss in the last block."""
        return plan.options[-1] in WITH_LOSS

    def install(self, run: Forward) -> Callable[[], None]:
        """Call ``run`` with hidden states, labels and more where the model calls its loss; return what ends that."""

        def loss(original: Forward, logits: Any, labels: Any, vocab_size: int, **options: Any) -> Any:
            if not isinstance(logits, DeferredLogits):
                return original(logits, labels, vocab_size, **options)
            assert vocab_size == self._head.out_features
            told = {name: options[name] for name in LOSS_ARGUMENTS if name in options}
            return run(logits.hand_over(), labels, **told, scaling=logits.scaling)

        return intercept_loss(self._owner, loss)

    def deferring(self, run: Forward) -> Forward:
        """Return what is called in place of the block: ``run`` without gradients, with them nothing yet."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            return DeferredLogits.of(_given(*args, **kwargs), self._head.out_features)

        return call


def _given(input: Tensor) -> Tensor:  # noqa: A002  (as nn.Linear calls it)
    return input
