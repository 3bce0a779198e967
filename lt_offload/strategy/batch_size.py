"""The batch size of a run: its place in the module or datamodule, and the choice of the best one.

The size must be known before the loaders and the optimizers' schedules are made, because schedules count batches. To
profile a training step at several sizes, an optimizer is made for that purpose and thrown away. Like everything in
``sample.py`` this leaves no trace: data, their order and generators are as if the size had been given. But the step
runs before hooks that only training calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import getitem, setitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.lightning import COMBINED_LOADER, data_source, loaded_checkpoint
from lt_offload.errors import ConfigError, InfeasibleError, OffloadError, OverBudget
from lt_offload.machine.replaced import own_attribute
from lt_offload.plan.batch.choose import choose_batch
from lt_offload.plan.batch.splits import LARGEST, Split
from lt_offload.plan.orders import compared
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.strategy.first import sample
from lt_offload.strategy.replay import KEY, Before, as_measured
from lt_offload.strategy.windows import choices_of

_LATER = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
"""Hooks that are called after the size was chosen."""
_NAME = "batch_size"
_SOME_BATCHES = 1000
"""Batches of an epoch for schedules that are thrown away."""


class BatchSize:
    """The attribute, or hyperparameter, ``batch_size`` of what makes the training loader; or ``ConfigError``."""

    def __init__(self, trainer: Any, setting: object) -> None:
        source = data_source(trainer)
        if not source.is_module():
            raise ConfigError(
                f"batch_size={setting!r} cannot be set: the loader was given to fit(), ready made; make it in "
                "train_dataloader() of a datamodule or of the LightningModule, from self.batch_size"
            )
        owners = (source.instance, trainer.datamodule, trainer.lightning_module)
        owner = next((owner for owner in owners if owner is not None and _holders(owner)), None)
        if owner is None:
            raise ConfigError(
                f"batch_size={setting!r} cannot be set: neither the datamodule nor the LightningModule has an "
                "attribute batch_size; set it where the dataloader is made and use batch_size=None"
            )
        self.owner = owner

    @property
    def value(self) -> int:
        """The size at present."""
        read, _ = _holders(self.owner)[0]
        return int(read())

    @value.setter
    def value(self, size: int) -> None:
        for _, write in _holders(self.owner):
            write(size)

    @contextmanager
    def set_to(self, size: int) -> Iterator[None]:
        """Have the loader made with batches of ``size`` within the context."""
        before = self.value
        self.value = size
        try:
            yield
        finally:
            self.value = before


def _holders(owner: Any) -> Sequence[tuple[Callable[[], Any], Callable[[int], None]]]:
    """Return functions that read and write the batch size of ``owner``, for each place in which it has that."""
    holders = [(partial(getattr, owner, _NAME), partial(setattr, owner, _NAME))] if hasattr(owner, _NAME) else []
    hyperparameters = getattr(owner, "hparams", None)
    # Both, as a loader may be made from either.
    if isinstance(hyperparameters, Mapping) and "batch_size" in hyperparameters:
        holders.append((partial(getitem, hyperparameters, _NAME), partial(setitem, hyperparameters, _NAME)))
    return holders


# -- which one --------------------------------------------------------------------------------------------------------


def size_of_the_run(trainer: Any, plan_path: str | Path | None) -> tuple[int, int] | None:
    """Return batch size and batches per update of the run to resume, or of a saved plan; None without both."""
    run = Before.of(loaded_checkpoint(trainer).get(KEY))
    plan = None if plan_path is None else Plan.load(plan_path)
    before, planned = run.batch_size, None if plan is None else plan.batch_size
    if loaded_checkpoint(trainer):
        if before is None:
            raise ConfigError(
                "batch_size='auto': the checkpoint does not say which batch size its run had; set batch_size to that"
            )
        if planned not in (None, before):
            raise ConfigError(
                f"plan={str(plan_path)!r} is for batch_size={planned}, the run of the checkpoint had "
                f"batch_size={before}; use a plan for that, or plan=None"
            )
    known = before or planned
    if known is None:
        return None
    count = run.settings.get("accumulate") if before or plan is None else plan.accumulate
    split = Split(known * count, count) if isinstance(count, int) else Split(known)
    rank_zero_info(f"offmate: {split.settings}, as in the {'checkpoint' if before else 'plan'}")
    return split.batch_size, split.accumulate


def choose(trainer: Any, optimizer: Optimizer, size: BatchSize, settings: Settings) -> tuple[Profile, Plan]:
    """Return the profile and the plan of the update with the highest throughput.

    Raises ``ConfigError`` if the size cannot be found out, or has no effect, and ``InfeasibleError`` if not even one
    sample fits.
    """
    profile, plan = choose_batch(
        _profiles(trainer, optimizer, size),
        settings,
        choices_of(trainer, size.value, _rows(trainer, size)),
        on_progress=lambda message: rank_zero_info(f"offmate: {message}"),
    )
    rank_zero_info(f"offmate: {plan.notes[-1]}")
    return profile, compared(plan, profile, replace(settings, accumulate=plan.accumulate))


def _profiles(trainer: Any, optimizer: Optimizer, size: BatchSize) -> Callable[[int, int], Profile]:
    """Return a function that profiles a training step with a batch of so many samples in so many parts.

    The figures of machine and optimizer are those of the first call.
    """
    first: list[Profile] = []

    def measured(wanted: int, parts: int) -> Profile:
        with size.set_to(wanted):
            problem = None
            try:
                batch = sample.SampleBatch.early(trainer)
                known = as_measured(first[0], optimizer) if first else {}
                alone = sample.measure(trainer, batch, parts, optimizer, known)
                profile: Profile = trainer.strategy.one_of(alone, known=known.get("hardware"))
            except Exception as error:
                # What the host's allocator raises is a RuntimeError like any other.
                full = isinstance(error, (torch.OutOfMemoryError, OverBudget, MemoryError))
                if not (full or "DefaultCPUAllocator" in str(error)):
                    raise _too_early(trainer, error) from error
                problem = str(error).partition("\n")[0]
        if problem is not None:  # outside of the handler, which keeps what the failed step has allocated
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise InfeasibleError(f"batch_size={wanted} does not fit while one block is measured: {problem}")
        if profile.batch_size != wanted:
            raise ConfigError(
                f"batch_size='auto' asked {type(size.owner).__name__} for a batch of {wanted} and got "
                f"{profile.batch_size}; make train_dataloader(), or the method {' or '.join(sample.BATCH_METHODS)}() "
                "if there is one, return self.batch_size samples, or give batch_size as an integer"
            )
        first.append(profile)
        return replace(profile, optimizer=first[0].optimizer, contention=first[0].contention)

    return measured


def _too_early(trainer: Any, error: Exception) -> Exception:
    """Return ``error``, or a better one if the module has later hooks that may make what its training step missed."""
    hook = limits.overridden([trainer.lightning_module], _LATER)
    if isinstance(error, OffloadError) or hook is None:
        return error
    return ConfigError(
        f"batch_size='auto' runs training_step before training begins, to measure it, and it raised "
        f"{type(error).__name__}: {error}; {hook} is called later: make what the step needs in __init__() or setup(), "
        "or give batch_size as an integer"
    )


@contextmanager
def spare_optimizer(trainer: Any) -> Iterator[Optimizer]:
    """Yield an optimizer like the one that will be used; no loader is made for its schedules."""
    strategy, loop = trainer.strategy, trainer.fit_loop
    # A schedule may ask for the number of steps: without this stand-in, Lightning would make the loader to count them.
    loader = own_attribute(loop, COMBINED_LOADER, SimpleNamespace(iterables=[]))
    with loader, own_attribute(loop, "max_batches", _SOME_BATCHES), sample.untouched(trainer):
        strategy.setup_optimizers(trainer)
    limits.check("optimizer", limits.Setup(model=strategy.model, optimizers=strategy.optimizers))
    (optimizer,) = strategy.optimizers
    try:
        yield optimizer
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = [], []


def _rows(trainer: Any, size: BatchSize) -> int:
    """Return the number of samples of the training data, as far as that is known."""
    with size.set_to(1):
        rows: int = sample.from_data(trainer, _shortest) // trainer.world_size
    return max(1, rows)


def _shortest(combined: Any) -> int:
    sets: list[Any] = [getattr(loader, "dataset", None) for loader in combined.flattened]
    return max(1, min((len(rows) for rows in sets if hasattr(rows, "__len__")), default=LARGEST))
