"""A training step of a Trainer, run to be measured, without a trace in the run that follows.

It is run on the first batch of training, once all hooks before it have been called. Only the choice of a batch size
comes before there are any: then the data are asked in a process of their own. What a training step changes is put back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lt_offload.compat.lightning import before_transfer, data_source, training_modes
from lt_offload.errors import ConfigError
from lt_offload.machine.forked import in_a_fork
from lt_offload.machine.replaced import own_attribute
from lt_offload.model.batch import Size
from lt_offload.model.snapshot import untouched as kept
from lt_offload.schema.profile import Profile

BATCH_METHODS = ("worst_case_batch", "sample_batch")
"""Methods of the module or the datamodule that may return the batch to plan for, best the largest that will come."""


_NOTHING: Mapping[str, Any] = {}
_LOGGED = 256
"""Bytes of the numbers that a step logs, which a step on trial does not make."""


def wants_larger(trainer: Any, size: Size) -> bool:
    """Return whether the module or the datamodule of ``trainer`` wants a larger batch to be measured than ``size``."""
    asked = _asked(trainer)
    if not asked:
        return False
    # The data of recipes change nothing, and looking for what has changed takes seconds.
    ours = all(method.__module__.startswith("lt_offload.") for method in asked)
    with nullcontext() if ours else untouched(trainer):
        wanted = named_batch(trainer)
    return wanted is not None and size.ratio(Size.of(wanted)) > 1


def named_batch(trainer: Any) -> Any:
    """Return the batch that the module or the datamodule of ``trainer`` wants to be measured, None if neither does."""
    return next((batch for ask in _asked(trainer) if (batch := ask()) is not None), None)


def _asked(trainer: Any) -> list[Callable[[], Any]]:
    named = (getattr(o, name, None) for o in (trainer.lightning_module, trainer.datamodule) for name in BATCH_METHODS)
    return [method for method in named if callable(method)]


def early_batch(trainer: Any) -> Any:
    """Return a batch before training begins: the module's choice, or the first; ``ConfigError`` if there is none."""
    batch = named_batch(trainer)
    return from_data(trainer, first_batch) if batch is None else batch


def as_seen(trainer: Any, batch: Any) -> Any:
    """Return ``batch`` as the module of ``trainer`` will see it, on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.strategy.batch_to_device(before_transfer(trainer.lightning_module, batch))


def _moved(trainer: Any, batch: Any, device: torch.device) -> Any:
    """Return ``batch``, which the module has seen, on ``device``."""
    hooks = import_module(f"{trainer.strategy.namespace}.core.hooks").DataHooks
    # The base's own way: the user's hook has moved this batch once, and is not called again.
    return hooks.transfer_batch_to_device(trainer.lightning_module, batch, device, 0)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A batch, as a training step sees it but on the host, and its number."""

    batch: Any
    index: int = 0

    @classmethod
    def of(cls, trainer: Any, batch: Any, index: int) -> SampleBatch:
        """Return the batch to measure where training begins with ``batch``: the module's choice, or a copy."""
        if _asked(trainer):
            with untouched(trainer):
                wanted = named_batch(trainer)
                # A copy: hooks may write to it, and the method may return the same one again.
                batch = batch if wanted is None else as_seen(trainer, copy.deepcopy(wanted))
        return cls(copy.deepcopy(_moved(trainer, batch, torch.device("cpu"))), index)

    @classmethod
    def early(cls, trainer: Any) -> SampleBatch:
        """Return the batch to measure before training begins."""
        with untouched(trainer):
            seen = as_seen(trainer, copy.deepcopy(early_batch(trainer)))
        return cls(_moved(trainer, seen, torch.device("cpu")))


def from_data(trainer: Any, ask: Callable[[Any], Any]) -> Any:
    """Return the result of ``ask`` for the training dataloaders, without a trace in loaders, data and generators.

    ``ask`` is called with Lightning's ``CombinedLoader`` of them. Raises ``ConfigError`` if the loader cannot be asked,
    see :func:`~lt_offload.machine.forked.in_a_fork`.
    """
    kind = import_module(f"{trainer.strategy.namespace}.utilities.combined_loader").CombinedLoader

    def work() -> Any:
        loader = data_source(trainer).dataloader()
        return ask(loader if isinstance(loader, kind) else kind(loader, "max_size_cycle"))

    return in_a_fork(
        work,
        what="asking the training dataloader",
        way_out=f"give the LightningModule or the datamodule a method {BATCH_METHODS[1]}() that returns a batch",
    )


def first_batch(combined: Any) -> Any:
    """Return the first batch of Lightning's ``combined`` loaders, which are not used again afterwards."""
    for loader in combined.flattened:
        if isinstance(loader, DataLoader):
            # In a forked process: workers would be processes below it, and pinning memory needs CUDA, which does not
            # survive a fork.
            loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    try:
        return next(iter(combined))[0]
    except StopIteration:
        raise ConfigError("the training dataloader has no batch; give it at least one") from None


def measure(
    trainer: Any, sample: SampleBatch, micro_batches: int, optimizer: Optimizer, known: Mapping[str, Any] = _NOTHING
) -> Profile:
    """Return the profile of one training iteration of ``trainer``.

    ``known`` are earlier measurements of the machine, as arguments of :func:`lt_offload.profile`.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    modes = training_modes(trainer)
    with untouched(trainer), ExitStack() as stack:
        for name, part in module.named_modules():  # while validation is checked, dropout holds nothing
            stack.callback(setattr, part, "training", part.training)
            part.training = modes.get(name, part.training)
        measured: Profile = strategy.profiled(
            # A copy, as the step may write to it, and this batch may be measured again.
            _moved(trainer, copy.deepcopy(sample.batch), strategy.root_device),
            micro_batches,
            optimizer,
            known,
            blocks=strategy.blocks,
            run=lambda batch: _step(strategy, batch, sample.index),
            on_progress=lambda message: rank_zero_info(f"offmate: {message}"),
        )
    return replace(measured, shared_bytes=measured.shared_bytes + _LOGGED)


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Let hooks and ``training_step`` run without a trace: logs go nowhere, whatever they change is put back.

    Global generators go on where they were. Raises ``UnsupportedError`` afterwards, if something cannot be put back.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    # A datamodule that only makes loaders is not searched: it may hold a whole data set.
    roots = {type(owner).__name__: owner for owner in (module, data) if owner is module or _takes_part(owner)}
    namespace = trainer.strategy.namespace
    with import_module(f"{namespace}.utilities.seed").isolate_rng(), kept(**roots), ExitStack() as undo:
        nowhere = import_module(f"{namespace}.loggers.logger").DummyLogger
        undo.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [nowhere() for _ in trainer.loggers]
        for name in ("log", "log_dict"):
            undo.enter_context(own_attribute(module, name, lambda *args, **kwargs: None))
        yield


def _takes_part(data: Any) -> bool:
    """Return whether a datamodule does more than make loaders, which happens in another process."""
    base = next((cls for cls in type(data).__mro__ if cls.__name__ == "LightningDataModule"), None)
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    own = any(getattr(type(data), hook) is not getattr(base, hook) for hook in hooks if base is not None)
    return own or any(hasattr(data, name) for name in BATCH_METHODS)


def _step(strategy: Any, batch: Any, index: int) -> Tensor | Mapping[str, Any]:
    """Return the result of a training step: the loss, or a mapping with the loss in it."""
    module = strategy.lightning_module
    indexed = len(inspect.signature(module.training_step).parameters) > 1
    output = strategy.training_step(batch, index) if indexed else strategy.training_step(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{type(module).__name__}.training_step returned {type(output).__name__} for the batch that is measured; "
            "it must return the loss, or a dict with the key 'loss'"
        )
    result: Tensor | Mapping[str, Any] = output
    return result
