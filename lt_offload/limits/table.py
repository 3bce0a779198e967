"""The table of limits: its rows, the check against it, its form for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Scope = Literal["trainer", "hf", "accelerate", "model", "optimizer", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The run that is about to begin, as far as its parts exist yet."""

    trainer: Any = None
    """A Lightning Trainer of either namespace, with the scope ``hf`` one of transformers, with ``accelerate`` an
    Accelerator; None in a plain loop."""
    model: nn.Module | None = None
    """The LightningModule, or the model of a plain loop."""
    optimizers: Sequence[Optimizer] = ()
    blocks: str | None = None
    """The name of the container of the model's layers, if the user has given one."""


Recogniser = Callable[[Setup], str | None]
"""A function that returns the offending setting with its value as the user wrote it, None if nothing is refused."""


@dataclass(kw_only=True, slots=True)
class Limit:
    """One thing that is not supported."""

    name: str
    scope: Scope
    """The earliest object that shows it: the trainer, the complete model, the optimizers, or the run itself."""
    why: str
    instead: str
    """The nearest thing that works."""
    training_only: bool = True
    """False if validation and prediction are refused too."""
    recognise: Recogniser = lambda run: None

    def __call__(self, recognise: Recogniser) -> Recogniser:
        """Let the decorated function recognise it."""
        self.recognise = recognise
        return recognise

    def error(self, use: str) -> UnsupportedError:
        """Return the error that refuses ``use``, which names what is used."""
        return UnsupportedError(f"{use}: {self.why}; {self.instead}")


def check(scope: Scope, run: Setup, *, training: bool = True) -> None:
    """Raise ``UnsupportedError`` for everything in ``run`` that is not supported, with one line per setting."""
    rows = [limit for limit in LIMITS if limit.scope == scope and (training or not limit.training_only)]
    problems = [str(limit.error(setting)) for limit in rows if (setting := limit.recognise(run)) is not None]
    if problems:
        raise UnsupportedError("not supported by the offmate strategy:\n" + "\n".join(f"- {line}" for line in problems))


LIMITS: list[Limit] = []
"""The table, in the order of the documentation."""


def limit(name: str, scope: Scope = "run", *, why: str, instead: str, training_only: bool = True) -> Limit:
    """Add a row, which decorates the function that recognises it.

    What shows only while training runs is recognised by the code that meets it, which raises :meth:`Limit.error`.
    """
    row = Limit(name=name, scope=scope, why=why, instead=instead, training_only=training_only)
    LIMITS.append(row)
    return row
