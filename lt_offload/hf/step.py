"""A training step of a Trainer: the start of its backward, and steps on trial that leave no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from lt_offload.compat.hugging_face import items_in_batch
from lt_offload.errors import ConfigError
from lt_offload.machine.replaced import Replaced
from lt_offload.model.snapshot import untouched

_ASIDE = ("model", "model_wrapped", "ref_model", "optimizer", "train_dataset", "eval_dataset", "callback_handler")
"""Attributes that a step leaves alone, or that the profiler puts back."""

Instead = Callable[[Tensor, Callable[[], None]], None]
"""A function of a tensor whose backward was to begin, and of what runs that backward."""

_instead: dict[int, Instead] = {}
"""The function to call in place of the next backward, by thread."""


@contextmanager
def at_backward(run: Instead) -> Iterator[None]:
    """Let ``run`` be called instead of the first backward within the context, whoever calls that.

    The method is another one meanwhile: a mode of torch would be on a stack from which ``run`` could take no others.
    """
    _instead[threading.get_ident()] = run
    try:
        with _BACKWARD.active():
            yield
    finally:
        _instead.pop(threading.get_ident(), None)


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        # Popped before it runs: a further backward within ``run`` is an ordinary one, and would call ``run`` again.
        run = _instead.pop(threading.get_ident(), None)
        begin = partial(original, tensor, *args, **kwargs)
        begin() if run is None else run(tensor, begin)

    return backward


_BACKWARD = Replaced(lambda: Tensor, "backward", _watched)


def without_backward(trainer: Any) -> ConfigError:
    """Return the error of a step of ``trainer`` in which no backward was seen."""
    return ConfigError(
        f"{type(trainer).__name__}.training_step returned without a backward, when it was to show what to plan; call "
        "self.accelerator.backward(loss) in it, or loss.backward()"
    )


class _Reached(BaseException):
    """The end of a trial step at the start of its backward; a user's ``except Exception`` does not catch it."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def _end(loss: Tensor, _backward: Callable[[], None]) -> None:
    raise _Reached(loss)


class TrainingStep:
    """A callable that runs the Trainer's own ``training_step`` as far as its backward, and returns the loss.

    What a subclass does after that, with gradients that are not there, is not run. If it has further backwards, each
    adds to the gradients as another micro-batch does.

    An object, and no function: what is below it is not searched for what the step changes.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trainer, self._model = trainer, model

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of ``batch`` whose backward is called; raises ``ConfigError`` if none is called."""
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        items = items_in_batch(trainer, [batch], trainer.args.device)
        try:
            with at_backward(_end):
                trainer._theirs.training_step(self._model, batch, items)
        except _Reached as reached:
            return reached.loss
        raise without_backward(trainer)


@contextmanager
def aside(trainer: Any) -> Iterator[None]:
    """Let steps of ``trainer`` leave no trace in it, nor in the global generators."""
    before = dict(vars(trainer))
    roots = {name: value for name, value in before.items() if name not in _ASIDE}
    try:
        with untouched(**roots):
            yield
    finally:
        # ``untouched`` puts objects back; attributes that the step added or removed are put back here.
        vars(trainer).clear()
        vars(trainer).update(before)
