"""The processes of a run under torch.distributed: shares of batches, totals over all, the one that speaks for all.

Their number, and the number of this one, are Lightning's, under any strategy and launcher.
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
"""Environment variables with the number of a process, as Lightning reads them before there is a Trainer."""
_PATIENCE = 10.0
"""Seconds for the first process to report the error, and to write the summary of the run."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one of several processes in a sequence: every ``of``-th item, from ``first`` on."""

    of: int = 1
    first: int = 0


def share_of(trainer: Any) -> Share:
    """Return the share of batches of this process of ``trainer``; all of them where there is no trainer.

    Processes that hold parts of one model take the same ones.
    """
    if trainer is None:
        return Share()
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if sampler is None:
        return Share(trainer.world_size, trainer.global_rank)
    return Share(sampler["num_replicas"], sampler["rank"])


def several(trainer: Any) -> bool:
    """Return whether ``trainer`` has other processes beside this one."""
    return trainer is not None and trainer.world_size > 1


def total(trainer: Any, counts: Tensor) -> Tensor:
    """Return ``counts`` of this process's batches, plus those of all others; all processes call this."""
    if not several(trainer):
        return counts
    # Processes that hold parts of one model have the same batches, which would count once for each of them.
    sums = _reduced(trainer, counts, "sum")
    of = share_of(trainer).of
    return sums if of == trainer.world_size else sums * of / trainer.world_size


def mean(trainer: Any, count: Tensor) -> Tensor:
    """Return the mean of ``count`` over all processes, in float32; all processes call this."""
    return _reduced(trainer, count.double(), "mean").float()


def _reduced(trainer: Any, value: Tensor, by: str) -> Tensor:
    strategy = trainer.strategy
    reduced: Tensor = strategy.reduce(value.to(strategy.root_device, copy=True), reduce_op=by)  # which is done in place
    return reduced


# -- the first one ----------------------------------------------------------------------------------------------------


def rank() -> int:
    """Return the number of this process; that of its environment while Lightning is not imported."""
    # Looked up and not imported: verbs that need no Lightning must not wait for it.
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    known: int | None = getattr(getattr(lightning, "rank_zero_only", None), "rank", None)
    return int(next((os.environ[name] for name in _RANKS if name in os.environ), 0)) if known is None else known


def is_first(*_: object) -> bool:
    """Return whether this process speaks and writes for all; also a filter of loggers."""
    return rank() == 0


def let_the_first_speak() -> None:
    """Wait before this process reports an error and ends.

    In nearly all cases the first process reports the same and then ends this one. Without the wait Lightning would kill
    it as soon as this one has ended.
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
