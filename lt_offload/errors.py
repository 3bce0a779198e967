"""Every error a user can meet, as one tree: what is wrong, with which value, and the nearest thing that works.

OffloadError
├── ConfigError (ValueError)       a setting, recipe or file that cannot be used as given
│   ├── UnsupportedError           a combination that is refused before training
│   └── PlanError                  a plan that is inconsistent, of another model or of another version
├── ModelError (ValueError)        a model without a usable block sequence
├── InfeasibleError (ValueError)   no plan fits the budgets
├── CheckpointError (OSError)      a checkpoint that cannot be written: disk full, folder read-only
├── OverBudget (RuntimeError)      an allocation that would pass the budget
└── ProcessError (RuntimeError)    another process of the run has failed, is gone or hangs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OffloadError(Exception):
    """Base of every error that lt_offload raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A setting, a recipe or a file cannot be used as given."""


class UnsupportedError(ConfigError):
    """A combination of settings that is refused before training because it could not be honoured exactly."""


class PlanError(ConfigError):
    """A plan (or profile) is inconsistent, belongs to another model, or was written by another version."""


class ModelError(OffloadError, ValueError):
    """The model has no block sequence that could be streamed, or cannot be planned without its weights."""


class InfeasibleError(OffloadError, ValueError):
    """No plan fits the budgets.

    ``needed_bytes`` is the smallest device budget that would work, where it is known; ``needed_host_bytes`` the
    smallest RAM, where that is what is too small.
    """

    def __init__(self, message: str, *, needed_bytes: int | None = None, needed_host_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.needed_host_bytes = needed_host_bytes


class CheckpointError(OffloadError, OSError):
    """A checkpoint cannot be written: the disk is full, or its folder is read-only. Older checkpoints are unharmed."""


class OverBudget(OffloadError, RuntimeError):
    """An allocation would pass the device or host budget; nothing was allocated."""


class ProcessError(OffloadError, RuntimeError):
    """Another process of the same run has failed, is gone or hangs; says which one, and its error where it is known."""


BEYOND_THE_PLAN = (
    "a batch that is longer than the planned one, or padded where that was not, and what callbacks, attributes and "
    "kept outputs hold on the device between steps are in no plan: plan for the largest batch, keep copies on the host "
    "(.cpu()), or set memory= to more"
)
"""The way out of an ``OverBudget`` in the middle of training, for the end of its sentence."""


@contextmanager
def because(change: str) -> Iterator[None]:
    """Let errors of planning again begin with the ``change`` that has made it necessary."""
    try:
        yield
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{change}: {error}", needed_bytes=error.needed_bytes, needed_host_bytes=error.needed_host_bytes
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, or the name of its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def named(error: BaseException) -> str:
    """Return ``error`` in one line, as of a defect: its class, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
