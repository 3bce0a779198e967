"""Several micro-batches per update under a Trainer: how many, and what may not happen between them."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn


def micro_batches(trainer: Any) -> int:
    """Return how many micro-batches an update of ``trainer`` may have: the most that a schedule of them says."""
    schedules = (getattr(callback, "scheduling", None) for callback in trainer.callbacks)
    counts = [count for schedule in schedules if isinstance(schedule, dict) for count in schedule.values()]
    most: int = max([trainer.accumulate_grad_batches, *(count for count in counts if isinstance(count, int))])
    return most


def not_within_window(filepath: Any, added: int) -> None:
    """Say that a checkpoint is not written."""
    rank_zero_warn(
        f"offmate: {filepath} is not written: the gradients of {added} micro-batches since the last update are in no "
        "checkpoint; save after an optimizer step, for example with every_n_train_steps"
    )
