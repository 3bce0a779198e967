"""Several micro-batches per update, and clipping, under a Trainer: its settings, and the hooks put in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lt_offload import limits
from lt_offload.compat.lightning import AFTER_CLOSURE, BEFORE_ZERO_GRAD, CLIP_GRADIENTS
from lt_offload.compat.torch import UNSCALES_ITSELF
from lt_offload.errors import ConfigError
from lt_offload.machine.replaced import own_attribute
from lt_offload.model.compiled import cover
from lt_offload.plan.batch.splits import LARGEST, Choices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lt_offload.execute.engine import Engine
    from lt_offload.plan import Settings


def fitting(trainer: Any) -> bool:
    """Return whether ``trainer`` trains."""
    return bool(trainer.state.fn == "fit")


def settings_from_trainer(settings: Settings, trainer: Any) -> Settings:
    """Return ``settings`` with the micro-batches and the clipping of ``trainer``, checked."""
    value = trainer.gradient_clip_val
    if value is not None and not value >= 0:
        raise ConfigError(f"gradient_clip_val={value} must be more than 0, or None to leave gradients as they are")
    count = batches_per_update(trainer)
    if count < 1:
        raise ConfigError(f"accumulate_grad_batches={count} must be at least 1: micro-batches per update")
    return replace(settings, accumulate=count, delayed=reads_gradients(trainer))


def batches_per_update(trainer: Any) -> int:
    """Return the longest window of ``trainer``, in micro-batches: the most that a schedule of them says."""
    # Of Lightning's ``GradientAccumulationScheduler``, which changes the Trainer's number from epoch to epoch.
    schedules = (getattr(callback, "scheduling", None) for callback in trainer.callbacks)
    counts = [count for schedule in schedules if isinstance(schedule, dict) for count in schedule.values()]
    most: int = max([trainer.accumulate_grad_batches, *(count for count in counts if isinstance(count, int))])
    return most


def choices_of(trainer: Any, batch_size: int, rows: int | None = None) -> Choices:
    """Return the updates that ``batch_size="auto"`` of the strategy of ``trainer`` may choose from.

    The samples per update are given by ``batch_size`` of the data and ``accumulate_grad_batches`` where that is more
    than 1, else they are free; a schedule gives the micro-batches. ``batch_size`` is that of the data as they are.
    ``rows``: samples that there are; None: that is not known. Raises ``ConfigError`` if an update has more samples than
    ``max_batch_size``, whatever is chosen.
    """
    strategy, count, longest = trainer.strategy, trainer.accumulate_grad_batches, batches_per_update(trainer)
    samples = count * batch_size if 1 < count == longest else None
    accumulate, limit = longest if longest > count else None, trainer.limit_train_batches
    if samples is accumulate is None and (isinstance(limit, int) or limit < 1):
        accumulate = 1  # an epoch may have fewer batches than an update
    bound, each = strategy.max_batch_size, trainer.world_size
    most = [LARGEST if bound is None else max(1, bound // each), *(() if rows is None else (rows,))]
    choices = Choices(most=min(most), samples=samples, parts=strategy.micro_batches, accumulate=accumulate)
    settings = [f"batch_size={batch_size}"] if samples else []
    settings += [f"micro_batches={choices.parts}"] if choices.parts not in (1, "auto") else []
    settings += [f"accumulate_grad_batches={longest}", *([f"{each} processes"] if each > 1 else [])]
    check_bound(trainer, choices.unit, f"{' and '.join(settings)} give at least")
    return choices


def check_bound(trainer: Any, samples: int, source: str) -> None:
    """Raise ``ConfigError`` if ``max_batch_size`` is less than ``samples`` of each process, which ``source`` says."""
    bound, least = trainer.strategy.max_batch_size, samples * trainer.world_size
    if bound is not None and least > bound:
        raise ConfigError(
            f"max_batch_size={bound} is less than the {least} samples per update that {source}; set "
            f"max_batch_size={least} or more, or change these"
        )


def split(trainer: Any, choices: Choices, batch_size: int, accumulate: int) -> None:
    """Let ``trainer`` accumulate as many micro-batches of ``batch_size`` as ``choices`` give, or else ``accumulate``.

    Raises ``ConfigError`` if there is no such number of micro-batches.
    """
    if choices.samples is not None and choices.samples % batch_size:
        raise ConfigError(
            f"batch_size='auto': {choices.samples} samples per update (batch_size times accumulate_grad_batches) are "
            f"no multiple of batch_size={batch_size}, which is that of the plan or the checkpoint; change batch_size "
            "or accumulate_grad_batches so that they are"
        )
    if choices.accumulate is None:
        trainer.accumulate_grad_batches = accumulate if choices.samples is None else choices.samples // batch_size


def warn_of_short_ones(trainer: Any) -> None:
    """Warn of windows that are shorter than ``trainer`` asks for, at the beginning of its loops."""
    wanted, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    if wanted > batches:
        rank_zero_warn(
            f"accumulate_grad_batches={wanted} is more than the {batches} batches of an epoch, with whose end every "
            f"window ends: each update has the gradients of {batches} at most"
            + ("" if knows_tokens(trainer) else f", divided by {wanted}")
        )
    seen = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    if 0 < seen < batches and seen % wanted:
        rank_zero_warn(
            f"the checkpoint was written after {seen} batches of its epoch, where no window of "
            f"accumulate_grad_batches={wanted} ends: the first update has the gradients of {wanted - seen % wanted}"
        )


def knows_tokens(trainer: Any) -> bool:
    """Return whether the loss of a window is a mean over its tokens: the module wants it, and batches count them."""
    wanted = getattr(trainer.lightning_module, "loss_average", "batches")
    return wanted == "tokens" or (wanted is None and getattr(trainer.datamodule, "counts_tokens", False))


LOOKING = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks in which gradients are complete, the last one with those of the update before."""


def looks_at_gradients(trainer: Any, hooks: Sequence[str] = LOOKING) -> str | None:
    """Return the first of ``hooks`` that the module or a callback of ``trainer`` overrides."""
    return limits.overridden([trainer.lightning_module, *trainer.callbacks], hooks)


def reads_gradients(trainer: Any) -> bool:
    """Return whether all gradients, or their norm, are read before they are used."""
    clips = (trainer.gradient_clip_val and not _by_value(trainer)) or _clips_by_hook(trainer)
    return clips or _scales(trainer) or looks_at_gradients(trainer) is not None


def _scales(trainer: Any) -> bool:
    """Return whether a ``GradScaler`` decides about each update, as under ``precision="16-mixed"``."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def _clips_by_hook(trainer: Any) -> bool:
    module = trainer.lightning_module
    return module is not None and limits.overrides(module, "configure_gradient_clipping")


def _by_value(trainer: Any) -> bool:
    algorithm = trainer.gradient_clip_algorithm
    return str(getattr(algorithm, "value", algorithm)) == "value"


def prepare(trainer: Any, engine: Engine) -> None:
    """Let ``engine`` clamp gradients if ``trainer`` always does, and keep them if a hook looks at them afterwards."""
    engine.keeps_gradients = looks_at_gradients(trainer, ["on_before_zero_grad"]) is not None
    value = trainer.gradient_clip_val
    # A module with a hook decides itself, each time, whether anything is clipped.
    if engine.plan is not None and value and _by_value(trainer) and not _clips_by_hook(trainer):
        engine.clip_value = float(value)


@contextmanager
def clipping(trainer: Any, present: Callable[[], Engine | None]) -> Iterator[None]:
    """Let the engine clip where the Trainer's precision plugin would look for gradients.

    The norms are put together in the order of the optimizer's parameters, as the plugin does. Hooks that look at
    gradients, and edit them, do so before that, or instead. ``present`` returns its engine.
    """
    plugin, module = trainer.precision_plugin, trainer.lightning_module
    plain_clip = plugin.clip_gradients

    def engine() -> Engine:
        # Asked each time: a plan that takes over brings another engine.
        active = present()
        assert active is not None
        return active

    def clips_afterwards() -> bool:
        return bool(_clips_by_hook(trainer) or trainer.gradient_clip_val)

    @contextmanager
    def shows(*, final: bool | None) -> Iterator[None]:
        """Let hooks within the context see gradients, and updates use what they have made of them.

        ``final``: these are what updates use then; None: unless they are clipped afterwards.
        """
        # After a step that no plan carries out, gradients are where everybody looks for them.
        if present() is None:
            yield
            return
        with engine().device.between():
            engine().show()
            yield
            engine().hide(final=not clips_afterwards() if final is None else final)

    def clip_gradients(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        # The plugin refuses to clip for a fused optimizer, whose step takes scaled gradients.
        if present() is None or (_scales(trainer) and getattr(optimizer, UNSCALES_ITSELF, False)):
            plain_clip(optimizer, clip_val, gradient_clip_algorithm)
            return
        if not clip_val > 0:
            return
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "norm":
            engine().clip_grad_norm_(clip_val, parameters=plugin.main_params(optimizer))
        elif _clips_by_hook(trainer):
            engine().clip_grad_value_(clip_val)
        else:  # the engine clips those of blocks when they are complete
            engine().clip_rest()

    loop, clips = trainer.fit_loop.epoch_loop.automatic_optimization, getattr(plugin, CLIP_GRADIENTS)
    before_zeroing = getattr(loop, BEFORE_ZERO_GRAD)

    def shown_before_zeroing(*args: Any, **kwargs: Any) -> None:
        # Before the first plan nothing has been used.
        used = present()
        with used.showing_used() if used is not None else nullcontext():
            before_zeroing(*args, **kwargs)

    def hidden(*args: Any, **kwargs: Any) -> Any:
        """Hide gradients after the hooks that look at them: the engine clips them where they are."""
        if present() is not None:
            engine().hide(final=not clips_afterwards())
        return clips(*args, **kwargs)

    with ExitStack() as undo:
        # On the objects, not their classes: other Trainers of the process are not concerned.
        undo.enter_context(own_attribute(plugin, "clip_gradients", clip_gradients))
        if looks_at_gradients(trainer, ["on_after_backward"]):
            undo.enter_context(own_attribute(plugin, "post_backward", shows(final=False)(plugin.post_backward)))
        if looks_at_gradients(trainer, ["on_before_zero_grad"]):
            undo.enter_context(own_attribute(loop, BEFORE_ZERO_GRAD, shown_before_zeroing))
        if looks_at_gradients(trainer, ["on_before_optimizer_step"]):
            after_closure = shows(final=None)(getattr(plugin, AFTER_CLOSURE))
            undo.enter_context(own_attribute(plugin, AFTER_CLOSURE, after_closure))
            # Lightning clips at the end of what shows gradients before the step, so that they are hidden again before
            # it does: the engine clips them where they are.
            undo.enter_context(own_attribute(plugin, CLIP_GRADIENTS, hidden))
        if _clips_by_hook(trainer):
            hooked = shows(final=True)(module.configure_gradient_clipping)
            undo.callback(cover(module, "configure_gradient_clipping", hooked))
        yield
