"""Logits that are for the model's own loss only: then the output projection and the loss may be one block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lt_offload.compat.torch import address_of, top_function_mode, tree_flatten, tree_leaves
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import Call
from lt_offload.model.head import (
    LOSS_ARGUMENTS,
    HeadLoss,
    Scaling,
    asks_form,
    chunk_tokens,
    intercept_loss,
    scaling_step,
    suits,
    uses_causal_loss,
)
from lt_offload.schema.profile import OptionName


class LogitsWatch(TorchFunctionMode):
    """Sees what is done with the output of the last block, from its return to the end of the run.

    On the stack of modes from :meth:`begin` to :meth:`end` only: code before that is not slowed down by it.

    Args:
        structure: the model's blocks.
        on_loss: told the loss that the model has computed of these logits itself.
    """

    def __init__(self, structure: Structure, on_loss: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_loss = on_loss
        self._owner, self._head = structure.owner, structure.blocks[-1].module
        self._possible = self._owner is not None and suits(self._head) and uses_causal_loss(self._owner)
        self._logits: Tensor | None = None
        """As they are after the steps of ``_scaling``."""
        self._scaling: Scaling = ()
        self._before: list[weakref.ref[Tensor]] = []
        """The logits before each of these steps; who still has them may use them."""
        self._used = False
        self._arguments: list[tuple[Any, int, dict[str, Any]]] = []
        """Arguments of the calls of the loss: labels, size of the vocabulary, others."""

    def install(self) -> Callable[[], None]:
        """Watch the calls of the model's loss; return a function that ends all watching."""
        undo = ExitStack()
        if self._possible:
            assert self._owner is not None
            undo.callback(intercept_loss(self._owner, self._loss))
            undo.callback(self._leave)
        return undo.close

    def begin(self, out: Any) -> None:
        """Begin to watch ``out``, which the last block has returned."""
        self._possible = self._possible and isinstance(out, Tensor)
        if self._possible:
            self._logits = out
            self.__enter__()  # type: ignore[no-untyped-call]

    def forgo(self) -> None:
        """Another forward begins: which logits a loss belongs to is not known any more."""
        self._leave()
        self._possible = False

    def end(self, result: Any) -> None:
        """End; to be called with what the run has returned."""
        logits = self._leave()
        if logits is not None:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            own = {address_of(tensor.untyped_storage()) for tensor in (logits, *self._earlier())}
            self._used |= any(address_of(leaf.untyped_storage()) in own for leaf in leaves)

    def _earlier(self) -> list[Tensor]:
        """Return the logits as they were before, as far as somebody has them."""
        return [tensor for ref in self._before if (tensor := ref()) is not None]

    def _leave(self) -> Tensor | None:
        """Take the mode off the stack if it is there; return the logits then."""
        logits, self._logits = self._logits, None
        if logits is not None:
            # A caller's own mode that ended meanwhile has taken this one off, and left its own place to us.
            self._used |= top_function_mode() is not self
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return logits

    def calls(self, call: Call) -> Mapping[OptionName, Call]:
        """Return what the last block, called as in ``call``, is called with under the options that have the loss."""
        rows = call.leaves[0].numel() // call.leaves[0].shape[-1] if call.slots == (0,) and len(call.leaves) == 1 else 0
        if not self._possible or self._used or len(self._arguments) != 1 or not rows or not call.has_backward:
            return {}
        head = self._head
        labels, vocabulary, others = self._arguments[0]
        assert type(head) is torch.nn.Linear
        if vocabulary != head.out_features or call.contexts.autocasts:
            return {}
        chunk = chunk_tokens(vocabulary)
        sizes: dict[OptionName, int] = {"fused": 0}
        # With one chunk all logits would exist after all, in another order of sums for nothing. In float16, gradients
        # that do not know yet by how much a loss is scaled up would come to nothing.
        if rows > chunk and head.weight.dtype is not torch.float16:
            sizes["chunked"] = chunk
        leaves, spec = tree_flatten(((call.leaves[0], labels), others | {"scaling": self._scaling}))
        return {
            name: Call(
                module=HeadLoss(head, size),
                leaves=leaves,
                spec=spec,
                slots=(0,),
                needs_grad=call.needs_grad,
                has_backward=True,
                contexts=call.contexts,
                reached={0},
            )
            for name, size in sizes.items()
        }

    def _loss(self, loss: Callable[..., Any], logits: Tensor, labels: Any, vocab_size: int, **options: Any) -> Any:
        # Not watched meanwhile: what the loss itself does with the logits is the use that is looked for.
        own, self._logits = self._logits, None
        result = loss(logits, labels, vocab_size, **options)
        self._logits = own
        if logits is own:
            others = {name: options[name] for name in LOSS_ARGUMENTS if name in options}
            self._arguments.append((labels, vocab_size, others))
            self._on_loss(result)
        return result

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = self._logits
        if logits is None or asks_form(func):
            return func(*args, **kwargs)
        step = scaling_step(func, args, kwargs)
        if step is not None and args[0] is logits and not self._arguments:
            self._before.append(weakref.ref(logits))
            self._logits, self._scaling = func(*args, **kwargs), (*self._scaling, step)
            return self._logits
        own = [logits, *self._earlier()]
        self._used |= any(leaf is tensor for leaf in tree_leaves((args, kwargs)) for tensor in own)
        return func(*args, **kwargs)
