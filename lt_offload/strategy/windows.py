"""Several micro-batches per update, and clipping, under a Trainer: what it asks for, and what it calls instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lt_offload.execute.engine import Engine
    from lt_offload.plan import Settings
    from lt_offload.schema.plan import Plan


def fitting(trainer: Any) -> bool:
    """Return whether ``trainer`` trains."""
    return bool(trainer.state.fn == "fit")


def asked(settings: Settings, trainer: Any) -> Settings:
    """Return ``settings`` with what ``trainer`` asks for."""
    return replace(settings, accumulate=micro_batches(trainer), delayed=clips_norm(trainer))


def micro_batches(trainer: Any) -> int:
    """Return how many micro-batches an update of ``trainer`` may have: the most that a schedule of them says."""
    schedules = (getattr(callback, "scheduling", None) for callback in trainer.callbacks)
    counts = [count for schedule in schedules if isinstance(schedule, dict) for count in schedule.values()]
    most: int = max([trainer.accumulate_grad_batches, *(count for count in counts if isinstance(count, int))])
    return most


def within_window(engine: Engine | None, filepath: Any) -> bool:
    """Return whether gradients of some micro-batches wait for an update; say that no checkpoint is written then."""
    if engine is None or not engine.added:
        return False
    rank_zero_warn(
        f"offmate: {filepath} is not written: the gradients of {engine.added} micro-batches since the last update are "
        "in no checkpoint; save after an optimizer step, for example with every_n_train_steps"
    )
    return True


def updates_during(trainer: Any, plan: Plan | None) -> bool:
    """Return whether the backward that begins updates weights."""
    waits = plan is not None and plan.delayed
    return not waits and not trainer.fit_loop._should_accumulate()


def clips_norm(trainer: Any) -> bool:
    """Return whether ``trainer`` clips gradients by their norm."""
    return bool(trainer.gradient_clip_val and trainer.gradient_clip_val > 0) and not _by_value(trainer)


def clip_by_value(trainer: Any, engine: Engine) -> None:
    """Let ``engine`` clamp gradients if ``trainer`` does."""
    value = trainer.gradient_clip_val
    if engine.plan is not None and value and value > 0 and _by_value(trainer):
        engine.clip_value = float(value)


def _by_value(trainer: Any) -> bool:
    algorithm = trainer.gradient_clip_algorithm
    return str(getattr(algorithm, "value", algorithm)) == "value"


@contextmanager
def clipping(trainer: Any, engine: Callable[[], Engine]) -> Iterator[None]:
    """Let the engine clip where the Trainer's precision plugin would look for gradients.

    The norms are put together in the order of the optimizer's parameters, as the plugin does.
    """
    plugin = trainer.precision_plugin

    def clip_gradients(optimizer: Any, clip_val: float = 0.0, *_: Any, **__: Any) -> None:
        if clip_val and clip_val > 0 and clips_norm(trainer):
            engine().clip_grad_norm_(clip_val, parameters=plugin.main_params(optimizer))

    plugin.clip_gradients = clip_gradients
    try:
        yield
    finally:
        del plugin.clip_gradients
