"""A batch and a training step of a Trainer, taken to profile them, without a trace in the run that follows.

The data are asked in a process of their own, and what a training step changes is put back. The caller isolates the
global generators, with :func:`isolated`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lt_offload.errors import ConfigError
from lt_offload.machine.forked import in_a_fork
from lt_offload.model.snapshot import untouched as kept
from lt_offload.schema.profile import HardwareProfile, Profile

BATCH_METHODS = ("worst_case_batch", "sample_batch")
"""Methods of the module or the datamodule that are asked for a batch first; the largest is the best one to plan for."""


def isolated(namespace: str) -> AbstractContextManager[None]:
    """Return a context that leaves all global generators as they were; ``namespace`` is that of the Trainer."""
    context: AbstractContextManager[None] = import_module(f"{namespace}.utilities.seed").isolate_rng()
    return context


def sample_batch(trainer: Any) -> Any:
    """Return a training batch of ``trainer``.

    Raises:
        ConfigError: if there is none, or if taking it would disturb the data's order.
    """
    batch = None
    for owner in (trainer.lightning_module, trainer.datamodule):
        for name in BATCH_METHODS:
            if batch is None and callable(getattr(owner, name, None)):
                batch = getattr(owner, name)()
    return from_data(trainer, first_batch) if batch is None else batch


def as_seen(trainer: Any, batch: Any) -> Any:
    """Return ``batch`` as the module of ``trainer`` will see it, on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.strategy.batch_to_device(trainer.lightning_module._on_before_batch_transfer(batch))


def from_data(trainer: Any, ask: Callable[[Any], Any]) -> Any:
    """Return what ``ask`` finds out about a training dataloader; loader, data and generators do not notice.

    Raises:
        ConfigError: if the loader cannot be asked, see :func:`~lt_offload.machine.forked.in_a_fork`.
    """
    return in_a_fork(
        lambda: ask(trainer.fit_loop._data_source.dataloader()),
        what="asking the training dataloader",
        way_out=f"give the LightningModule or the datamodule a method {BATCH_METHODS[1]}() that returns a batch",
    )


def first_batch(loader: Any) -> Any:
    """Return the first batch of a loader, or of each loader in a collection. It is not used again afterwards."""
    if isinstance(loader, Mapping):
        return {key: first_batch(member) for key, member in loader.items()}
    if isinstance(loader, (list, tuple)):
        return [first_batch(member) for member in loader]
    members = getattr(loader, "flattened", None)  # of Lightning's CombinedLoader
    for member in [loader] if members is None else members:
        if isinstance(member, DataLoader):
            member.num_workers, member.timeout, member.pin_memory = 0, 0, False
    try:
        first = next(iter(loader))
    except StopIteration:
        raise ConfigError("the training dataloader has no batch; give it at least one") from None
    return first if members is None else first[0]


def measure(
    trainer: Any,
    optimizer: Optimizer,
    hardware: HardwareProfile | None = None,
    *,
    micro_batches: int = 1,
    batch_size: int | None = None,
) -> Profile:
    """Return the profile of one training iteration of ``trainer``.

    Args:
        trainer: whose strategy keeps the batch, so that another profile of that size is one of the same batch.
        optimizer: that it uses.
        hardware: the machine, if it was measured.
        micro_batches: parts in which each block takes the batch.
        batch_size: of a batch that was measured before and is measured again, if the strategy has kept it.
    """
    from lt_offload.profiling.measure import profile

    module, strategy = trainer.lightning_module, trainer.strategy
    with untouched(trainer):
        batch = strategy.samples.get(batch_size)
        batch = sample_batch(trainer) if batch is None else batch
        found = profile(
            module,
            as_seen(trainer, copy.deepcopy(batch)),
            optimizer=optimizer,
            device=strategy.root_device,
            hardware=hardware,
            blocks=strategy.blocks,
            micro_batches=micro_batches,
            run=lambda batch: _step(strategy, batch),
            on_progress=lambda message: rank_zero_info(f"offmate: {message}"),
        )
    strategy.samples[found.batch_size] = batch
    return found


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Let hooks and ``training_step`` run without a trace: logs go nowhere, whatever they change is put back.

    Raises:
        UnsupportedError: afterwards, if something cannot be put back.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    roots = {type(owner).__name__: owner for owner in (module, data) if owner is module or _takes_part(owner)}
    with kept(**roots):
        loggers = trainer.loggers
        nowhere = import_module(f"{trainer.strategy.namespace}.loggers.logger").DummyLogger
        trainer.loggers = [nowhere() for _ in loggers]
        silenced = dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)
        own = {name: vars(module)[name] for name in silenced if name in vars(module)}
        vars(module).update(silenced)
        try:
            yield
        finally:
            trainer.loggers = loggers
            for name in silenced:
                del vars(module)[name]
            vars(module).update(own)


def _takes_part(data: Any) -> bool:
    """Return whether a datamodule does more than make loaders, which happens in another process."""
    base = next((cls for cls in type(data).__mro__ if cls.__name__ == "LightningDataModule"), None)
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    own = any(getattr(type(data), hook) is not getattr(base, hook) for hook in hooks if base is not None)
    return own or any(hasattr(data, name) for name in BATCH_METHODS)


def _step(strategy: Any, batch: Any) -> Tensor | Mapping[str, Any]:
    """Return what a training step returns: the loss, or with what the Trainer keeps of the step beside it."""
    module = strategy.lightning_module
    indexed = len(inspect.signature(module.training_step).parameters) > 1
    output = strategy.training_step(batch, 0) if indexed else strategy.training_step(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{type(module).__name__}.training_step returned {type(output).__name__} for the sample batch; it must "
            "return the loss, or a dict with the key 'loss'"
        )
    result: Tensor | Mapping[str, Any] = output
    return result
