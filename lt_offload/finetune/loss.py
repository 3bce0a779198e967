"""The loss of an update: the mean of all the tokens of its batches, or of the means of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lt_offload.errors import UnsupportedError
from lt_offload.model.head import intercept_loss, uses_causal_loss

LossAverage = Literal["tokens", "batches"]


@contextmanager
def mean_over(model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Let the loss of ``model`` be the sum of its tokens' losses over ``tokens``, a number of more than its own.

    Raises ``UnsupportedError`` if the model does not compute its loss by the function of transformers that can do so.
    """
    from transformers import PreTrainedModel

    owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    called = []

    def divided(loss: Callable[..., Any], *args: Any, **options: Any) -> Any:
        called.append(loss)
        return loss(*args, **options | {"num_items_in_batch": tokens})

    if uses_causal_loss(owner):
        # The function is told, not the model: a model may drop the argument, and would hand it to every layer.
        undo = intercept_loss(owner, divided)
        try:
            yield
        finally:
            undo()
    if not called:
        raise UnsupportedError(
            f"model.loss_average=tokens: {type(owner).__name__} computes its loss itself, as a mean over each batch; "
            "set model.loss_average=batches, or trainer.accumulate_grad_batches=1 with a larger data.batch_size"
        )


def undivided(loss: Tensor, count: int) -> Tensor:
    """Return ``loss`` times ``count``, by which Lightning is going to divide it; its gradient will be 1 to the bit.

    The product would not do: for 41, in float32, what is multiplied is not what was divided.
    """
    return loss / (torch.ones_like(loss.detach()) / count)
