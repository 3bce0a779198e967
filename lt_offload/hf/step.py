"""A training step of a Trainer, run to be measured, without a trace in the run that follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lt_offload.compat.hugging_face import items_in_batch
from lt_offload.errors import ConfigError
from lt_offload.model.snapshot import untouched

_ASIDE = ("model", "model_wrapped", "ref_model", "optimizer", "train_dataset", "eval_dataset", "callback_handler")
"""Attributes that a step leaves alone, or that the code which measures it looks after."""


class TrainingStep:
    """Runs the Trainer's own ``training_step`` as far as its backward, and returns the loss.

    An object, and no function: what is below it is not searched for what the step changes.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trainer, self._model = trainer, model

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of ``batch``, as the backward would have it."""
        trainer, losses = self._trainer, list[Tensor]()
        accelerator = trainer.accelerator

        def backward(loss: Tensor, **_: Any) -> None:
            # As ``accelerator.backward`` divides it.
            losses.append(loss / accelerator.gradient_accumulation_steps)

        before = dict(vars(accelerator))
        vars(accelerator)["backward"] = backward
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        try:
            items = items_in_batch(trainer, [batch], trainer.args.device)
            trainer.training_step(self._model, batch, items)
        finally:
            del vars(accelerator)["backward"]
            vars(accelerator).update({k: v for k, v in before.items() if k == "backward"})
        if len(losses) != 1:
            raise ConfigError(
                f"{type(trainer).__name__}.training_step called accelerator.backward {len(losses)} times for the batch "
                "that is measured; it must call it once"
            )
        return losses[0]


@contextmanager
def kept(trainer: Any) -> Iterator[None]:
    """Let ``trainer`` do things that leave no trace in it, nor in the global generators."""
    before = dict(vars(trainer))
    roots = {name: value for name, value in before.items() if name not in _ASIDE}
    try:
        with untouched(**roots):
            yield
    finally:
        # Objects are put back by ``untouched``; which attributes there are, here.
        vars(trainer).clear()
        vars(trainer).update(before)
