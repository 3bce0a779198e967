"""Learning from pairs of a chosen and a rejected answer, by DPO (Rafailov et al., 2023), as TRL's ``DPOTrainer`` does.

A batch has the chosen answers in its first half and the rejected ones in the second. The reference is the model without
its adapters: it needs no weights of its own. Its log-probabilities are computed before the training, once for each
pair, so that a training step has one forward, which is what a plan is made for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches import REFERENCE
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.load import dropouts
from lt_offload.finetune.processes import total
from lt_offload.finetune.terminal import clear, say, status
from lt_offload.model.head import label_log_probs
from lt_offload.strategy.checkpoint.resume import ExactResume

if TYPE_CHECKING:
    from lt_offload.finetune.data.module import FineTuneData
    from lt_offload.finetune.module import FineTune

Batch = dict[str, Tensor]
BETA = 0.1
"""The usual ``dpo_beta``."""
_REWARDS = ("chosen", "rejected", "accuracies", "margins")
METRICS = (*(f"rewards/{name}" for name in _REWARDS), "logps/chosen", "logps/rejected")
"""Figures of a batch beside its loss, as TRL calls them: means over its pairs."""


def check_pairs(module: FineTune, data: FineTuneData, config: Any, strategy: Any = None) -> None:
    """Raise ``ConfigError`` for settings that do not suit pairs, or that nothing but pairs would take notice of."""
    if not getattr(data, "pairs", False):
        if module.dpo_beta != BETA:
            raise ConfigError(
                f"model.dpo_beta={module.dpo_beta} changes nothing with data that are no pairs; set it to {BETA}, or "
                "set data.format=preference"
            )
        return
    if module.lora is None:
        has = "model.lora=null" if module.adapter is None else f"model.adapter={module.adapter!r}"
        raise ConfigError(
            f"{has}: with data.format=preference the reference is the model without new adapters; set model.lora.r=8 "
            "(of a model with its adapters merged by 'lt-finetune export', if there are some), or train other weights "
            "by TRL's DPOTrainer within lt_offload.hf_trainer"
        )
    if module.loss_average == "tokens":
        raise ConfigError(
            "model.loss_average=tokens: the loss of data.format=preference is a mean over pairs; set it to batches"
        )
    own = max(dropouts(config).values(), default=0.0)
    for name, value in {"dropout": module.dropout, "lora.dropout": module.lora.dropout}.items():
        if value or (value is None and own):
            has = f"model.{name}=null, with {own} in the model itself," if value is None else f"model.{name}={value}"
            raise ConfigError(
                f"{has} would make the model differ from its reference; set it to 0 with data.format=preference"
            )
    if module.lora.bias != "none":
        raise ConfigError(
            f"model.lora.bias={module.lora.bias} changes the reference of data.format=preference, too; set it to none"
        )
    if getattr(strategy, "batch_size", None) == "auto":
        raise ConfigError(
            "trainer.strategy.batch_size=auto is not offered with data.format=preference, whose references are of "
            "batches of one size; set data.batch_size, and trainer.strategy.batch_size=null"
        )


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability of the learned tokens of each row of ``batch``, ``[rows]``, in fp32."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", REFERENCE)}
    logits = model(**inputs, use_cache=False).logits
    following = functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    counts = following != IGNORED
    targets = following.masked_fill(~counts, 0)
    picked = label_log_probs(logits.flatten(0, 1), targets.reshape(-1, 1)).view_as(targets)
    return picked.masked_fill(~counts, 0).sum(1)


@torch.no_grad()
def reference_log_probs(model: Any, batch: Batch) -> Tensor:
    """Return :func:`log_probs` of ``model`` without its adapters."""
    with model.disable_adapter():
        return log_probs(model, batch)


def dpo(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, ...]:
    """Return the sigmoid loss of DPO, and then the ``METRICS``, from log-probabilities of chosen and rejected answers.

    Equation 7 of Rafailov et al., 2023 (https://arxiv.org/abs/2305.18290), as a mean over the pairs.
    """
    ratios = policy - reference
    chosen, rejected = ratios.chunk(2)
    loss = -functional.logsigmoid(beta * (chosen - rejected)).mean()
    rewards, known = beta * ratios.detach(), policy.detach().view(2, -1)
    better, worse = rewards.chunk(2)
    each = torch.stack([better, worse, (better > worse).float(), better - worse, *known])
    return loss, *each.mean(1)


def pair_loss(model: nn.Module, batch: Batch, beta: float) -> tuple[Tensor, ...]:
    """Return the loss of a batch of pairs, then its ``METRICS``; without gradients the reference is computed, too."""
    reference = batch[REFERENCE] if torch.is_grad_enabled() else reference_log_probs(model, batch)
    return dpo(log_probs(model, batch), reference, beta)


def planned_loss(model: nn.Module, batch: Batch, beta: float) -> Tensor:
    """Return the loss of a batch of pairs without references, for a plan."""
    return pair_loss(model, batch | {REFERENCE: torch.zeros(len(batch["labels"]))}, beta)[0]


def add_references(trainer: Any) -> None:
    """Compute the references of the pairs, if data are some, that training will come to and that are not known yet."""
    if not getattr(trainer.datamodule, "pairs", False):
        return
    data: FineTuneData = trainer.datamodule
    reference = data.reference
    assert reference is not None
    count, steps, start = 0, data.unknown_pairs(), time.monotonic()
    for number, pairs in enumerate(steps):
        # The first batch may show what to plan, and takes longer than all others.
        start = time.monotonic() if number == 1 else start
        eta = timedelta(seconds=math.ceil((time.monotonic() - start) / max(number - 1, 1) * (len(steps) - number)))
        left = f", eta {eta}" if number > 1 else ""
        status(f"references of the pairs, before the training: batch {number + 1:,} of {len(steps):,}{left}")
        own, batch = data.share_of_pairs(pairs)
        # As a step of the strategy, which knows where the model is and what memory there is for it.
        known = trainer.strategy.predict_step(trainer.strategy.batch_to_device(batch), 0)
        sums = torch.zeros(len(pairs), 3)
        sums[own, :2], sums[own, 2] = known.view(2, -1).T.cpu(), 1
        sums = total(trainer, sums).cpu()
        reference[pairs] = sums[:, :2] / sums[:, 2:]
        count += len(pairs)
        # All of them may take hours: a signal ends that with a checkpoint, from which a run goes on.
        for callback in trainer.callbacks:
            if isinstance(callback, ExactResume):
                callback.leave_before_start(trainer)
    clear()
    if count:
        say(f"reference: {count:,} pairs, by the model without adapters")


def with_references(on_train_start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``on_train_start`` behind :func:`add_references`: that of a subclass may not call its base's."""

    @wraps(on_train_start)
    def hook(module: FineTune) -> None:
        add_references(module.trainer)
        on_train_start(module)

    return hook
