"""The last block together with the loss, and what users find in place of logits then.

Under the options that compute the loss in the last block, its call only notes what it was given: the block runs when
the model calls its loss. Until then, and in the model's result, a stand-in has shape, dtype and device of the logits.
Those never all exist, or gradients take their place, so that every other use of it raises. In a step that no plan was
made for yet, another use before the loss lets the logits exist after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map
from lt_offload.errors import PlanError
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import Forward
from lt_offload.model.head import (
    LOSS_ARGUMENTS,
    HeadLoss,
    Scaling,
    asks_form,
    chunk_tokens,
    in_chunks,
    intercept_loss,
    scaled,
    scaling_step,
    suits,
    uses_causal_loss,
)
from lt_offload.model.state.contexts import ambient
from lt_offload.schema.profile import WITH_LOSS, OptionName


class DeferredLogits(Tensor):
    """Stands for logits that are not computed as a whole."""

    hidden: Tensor | None
    """The hidden states that they would be made of, until the loss has taken them."""
    scaling: Scaling
    """Steps that the model has applied to them since."""
    project: Forward | None
    """Computes the logits of hidden states, where that may still be done."""
    logits: Tensor | None
    """The logits, once that has computed them."""

    @staticmethod
    def of(hidden: Tensor, vocabulary: int, scaling: Scaling = (), project: Forward | None = None) -> DeferredLogits:
        """Return the stand-in for the projection of ``hidden`` after ``scaling``."""
        made: DeferredLogits = make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], vocabulary), dtype=hidden.dtype, device=hidden.device
        )
        made.hidden, made.scaling, made.project, made.logits = hidden, scaling, project, None
        return made

    def computed(self, use: str) -> Tensor:
        """Return the logits for another use than the loss; refused if they never exist, or the loss has been."""
        if self.logits is None:
            if self.project is None:
                raise _refusal(use)
            if self.hidden is None:
                raise limits.LOSS_IN_CHUNKS.error(f"after the loss, its logits were used by {use}")
            self.logits = scaled(self.project(self.hand_over()), self.scaling)[0]
        return self.logits

    def hand_over(self) -> Tensor:
        """Return the hidden states, once; raises ``UnsupportedError`` the second time."""
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
            steps = (*logits.scaling, step)
            return DeferredLogits.of(logits.hand_over(), logits.shape[-1], steps, logits.project)

        def real(leaf: Any) -> Any:
            return leaf.computed(name or str(func)) if isinstance(leaf, DeferredLogits) else leaf

        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))

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
    """Lets the last block run when the model calls its loss.

    ``owner`` is the model that calls the loss. ``chunk``: tokens of which logits exist together; 0: all of them.
    ``planned``: a plan says so; else logits may be computed as long as there is no loss.
    """

    def __init__(self, owner: nn.Module, head: nn.Linear, chunk: int, *, planned: bool) -> None:
        self._owner, self._head, self._planned = owner, head, planned
        self.module = HeadLoss(head, chunk)
        """The block and the loss."""

    @classmethod
    def planned(cls, structure: Structure, option: OptionName, chunk: int) -> LossInBlock | None:
        """Return the loss of the last block, if a plan wants it there by ``option``, in chunks of ``chunk`` tokens.

        Raises ``PlanError`` if the model computes its loss in another way, or without the block.
        """
        if option not in WITH_LOSS:
            return None
        owner, head = _loss_of(structure)
        if owner is None:
            raise PlanError(
                f"the plan computes the loss in block {structure.blocks[-1].name} (option {option!r}), but "
                "the model does not take ForCausalLMLoss of a plain nn.Linear; plan again"
            )
        return cls(owner, head, chunk, planned=True)

    @classmethod
    def early(cls, structure: Structure, chunk: int | None) -> LossInBlock | None:
        """Return a loss in chunks of ``chunk`` tokens (0: all, None: as suits) for a step without a plan, or None."""
        owner, head = _loss_of(structure)
        if owner is None:
            return None
        return cls(owner, head, chunk_tokens(head.out_features) if chunk is None else chunk, planned=False)

    def install(self, run: Forward) -> Callable[[], None]:
        """Call ``run`` with hidden states, labels and more where the model calls its loss; return what ends that."""

        def loss(original: Forward, logits: Any, labels: Any, vocab_size: int, **options: Any) -> Any:
            if not isinstance(logits, DeferredLogits):
                return original(logits, labels, vocab_size, **options)
            if logits.logits is not None or (not self._planned and vocab_size != self._head.out_features):
                return original(logits.computed("its loss"), labels, vocab_size, **options)
            assert vocab_size == self._head.out_features
            told = {name: options[name] for name in LOSS_ARGUMENTS if name in options}
            return run(logits.hand_over(), labels, **told, scaling=logits.scaling)

        return intercept_loss(self._owner, loss)

    def deferring(self, run: Forward) -> Forward:
        """Return what is called in place of the block: ``run`` without gradients, with them nothing yet."""

        def call(*args: Any, **kwargs: Any) -> Any:
            hidden = _given(*args, **kwargs)
            if not torch.is_grad_enabled() or not (self._planned or self._pays(hidden)):
                return run(*args, **kwargs)
            return DeferredLogits.of(hidden, self._head.out_features, project=None if self._planned else run)

        return call

    def _pays(self, hidden: Tensor) -> bool:
        """Return whether there is more than one chunk or none, in a precision that such a loss can have."""
        chunk = self.module.chunk
        return (not chunk or in_chunks(hidden, self._head.weight, chunk)) and not ambient().autocasts


def _loss_of(structure: Structure) -> tuple[nn.Module | None, Any]:
    """Return the model that calls a loss which may be computed in the last block, None if there is none; and that."""
    owner, head = structure.owner, structure.blocks[-1].module
    return (owner, head) if owner is not None and suits(head) and uses_causal_loss(owner) else (None, head)


def _given(input: Tensor) -> Tensor:  # noqa: A002  (as nn.Linear calls it)
    return input
