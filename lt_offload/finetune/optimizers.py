"""Updates: what optimizers take, and the loss, a mean over all tokens or over batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.model.head import intercept_loss, uses_causal_loss

if TYPE_CHECKING:
    from lt_offload.finetune.module import FineTune

OptimizerName = Literal["adamw", "adamw8bit", "adam", "sgd", "adafactor"]

Schedule = Literal["cosine", "linear", "constant"]

WITH_BETAS = ("adamw", "adamw8bit", "adam")


def check_precision(module: FineTune) -> None:
    """Raise ``ConfigError`` for updates of few bits that would change nothing, be rounded away, or are not offered."""
    optimizer, dtype, state_dtype = module.optimizer, module.model_dtype, module.state_dtype
    adapted = module.lora is not None or module.adapter is not None
    if module.master_weights and module.stochastic_rounding:
        raise ConfigError(
            "model.stochastic_rounding=true does without the copies that model.master_weights=true keeps; set one "
            "of them to false"
        )
    flag = next((name for name in ("master_weights", "stochastic_rounding") if getattr(module, name)), None)
    if flag is not None and dtype != "bfloat16":
        raise ConfigError(
            f"model.{flag}=true changes nothing with model.dtype={dtype}; set it to false, or set model.dtype=bfloat16"
        )
    if flag is not None and adapted:
        raise ConfigError(
            f"model.{flag}=true changes nothing with model.lora or model.adapter, whose adapters are float32 in any "
            "case; set it to false"
        )
    if flag is not None and optimizer not in ("adamw", "adamw8bit"):
        raise ConfigError(f"model.{flag}=true is not offered with model.optimizer={optimizer}; use adamw or adamw8bit")
    if state_dtype is not None and optimizer != "adamw":
        raise ConfigError(f"model.state_dtype={state_dtype} is not offered with model.optimizer={optimizer}; use adamw")
    rounded = flag is None and not adapted and dtype == "bfloat16"
    if rounded and (optimizer == "adamw8bit" or state_dtype is not None):
        fewer = "model.optimizer=adamw8bit" if state_dtype is None else f"model.state_dtype={state_dtype}"
        raise ConfigError(
            f"{fewer} with model.dtype=bfloat16 needs model.stochastic_rounding=true or model.master_weights=true, as "
            "small updates of plain bfloat16 weights are rounded away; set one of them"
        )


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


def lr_factor(schedule: Schedule, *, warmup: int, total: float, floor: float) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the step."""

    def factor(step: int) -> float:
        if step < warmup:
            # Never 0, with which the first step would change nothing.
            return (step + 1) / (warmup + 1)
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
        remaining = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return floor + (1 - floor) * remaining

    return factor
