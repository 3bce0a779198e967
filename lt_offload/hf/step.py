"""A training step of a Trainer, run to be measured, without a trace in the run that follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lt_offload.compat.hugging_face import items_in_batch
from lt_offload.compat.torch import pop_function_mode, push_function_mode
from lt_offload.errors import ConfigError
from lt_offload.model.snapshot import untouched

_ASIDE = ("model", "model_wrapped", "ref_model", "optimizer", "train_dataset", "eval_dataset", "callback_handler")
"""Attributes that a step leaves alone, or that the code which measures it looks after."""


class _Reached(BaseException):
    """Ends a step where its backward begins; ``except Exception`` of a user's does not see it."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class _UntilBackward(TorchFunctionMode):
    """Ends what runs below it where the backward of a tensor is called, whoever calls it."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            raise _Reached(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _until_backward() -> Iterator[None]:
    mode, above = _UntilBackward(), list[Any]()
    push_function_mode(mode)
    try:
        yield
    finally:
        # What measures the step has put modes on top meanwhile, which are to stay.
        while (top := pop_function_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            push_function_mode(other)


class TrainingStep:
    """Runs the Trainer's own ``training_step`` as far as its backward, and returns the loss.

    What a subclass does after that, with gradients that are not there, is not run. If it has further backwards, each
    adds to the gradients as another micro-batch does.

    An object, and no function: what is below it is not searched for what the step changes.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trainer, self._model = trainer, model

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of ``batch`` whose backward is called.

        Raises:
            ConfigError: if none is called.
        """
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        items = items_in_batch(trainer, [batch], trainer.args.device)
        try:
            with _until_backward():
                trainer.training_step(self._model, batch, items)
        except _Reached as reached:
            return reached.loss
        raise ConfigError(
            f"{type(trainer).__name__}.training_step returned without a backward for the batch that is measured; call "
            "self.accelerator.backward(loss) in it, or loss.backward()"
        )


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
