"""The processes of a run under torch.distributed: whose batches are which, what all have together, who speaks for all.

How many there are, and which one this is, is what Lightning says: of any strategy, and whoever has started them.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Where Lightning, too, looks for the number of a process before there is a Trainer."""
_PATIENCE = 10.0
"""Seconds in which the first process says what has gone wrong, and writes how far the run came."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one of several processes in what comes one by one: every ``of``-th, from ``first`` on."""

    of: int = 1
    first: int = 0


def share_of(trainer: Any) -> Share:
    """Return which batches this process of ``trainer`` takes; all of them where there is no trainer.

    Processes that hold parts of one model take the same ones.
    """
    if trainer is None:
        return Share()
    given = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if given is None:
        return Share(trainer.world_size, trainer.global_rank)
    return Share(given["num_replicas"], given["rank"])


def several(trainer: Any) -> bool:
    """Return whether ``trainer`` has other processes beside this one."""
    return trainer is not None and trainer.world_size > 1


def total(trainer: Any, counts: Tensor) -> Tensor:
    """Return ``counts`` of this process's batches, plus those of all others; all processes call this."""
    if not several(trainer):
        return counts
    # Processes that hold parts of one model have the same batches, which would count once for each of them.
    found = _reduced(trainer, counts, "sum")
    of = share_of(trainer).of
    return found if of == trainer.world_size else found * of / trainer.world_size


def mean(trainer: Any, count: Tensor) -> Tensor:
    """Return the mean of ``count`` over all processes, in float32; all processes call this."""
    return _reduced(trainer, count.double(), "mean").float()


def _reduced(trainer: Any, value: Tensor, by: str) -> Tensor:
    strategy = trainer.strategy
    found: Tensor = strategy.reduce(value.to(strategy.root_device, copy=True), reduce_op=by)  # which is done in place
    return found


# -- who speaks -------------------------------------------------------------------------------------------------------


def rank() -> int:
    """Return the number of this process; that of its environment while Lightning is not imported."""
    # Looked up and not imported: verbs that need no Lightning must not wait for it.
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    known: int | None = getattr(getattr(lightning, "rank_zero_only", None), "rank", None)
    return int(next((os.environ[name] for name in _RANKS if name in os.environ), 0)) if known is None else known


def is_first(*_: object) -> bool:
    """Return whether this process speaks and writes for all; a filter for what loggers are told."""
    return rank() == 0


def let_the_first_speak() -> None:
    """Wait before this process says what has gone wrong, and ends.

    The first one says the same in nearly all cases, and then ends this one. It could not if this one had ended:
    Lightning would have killed it for that.
    """
    time.sleep(_PATIENCE)


def end_others(trainer: Any) -> None:
    """End the processes that ``trainer`` has started and that have not ended yet.

    Lightning watches them, and would kill this one if one of them ended by itself.
    """
    started: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    others, started[:] = list(started), []
    for process in others:
        process.kill()
    for process in others:
        process.wait()
