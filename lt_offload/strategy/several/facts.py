"""A process's facts before training, for all to compare: differences would give other numbers, or hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_offload.errors import ConfigError
from lt_offload.model.compiled import kernels_of
from lt_offload.schema.plan import PLAN_SCHEMA
from lt_offload.schema.profile import PROFILE_SCHEMA

if TYPE_CHECKING:
    from lt_offload.model.blocks import Structure
    from lt_offload.strategy.offmate import OffmateStrategy


def facts(strategy: OffmateStrategy, trainer: Any, structure: Structure) -> dict[str, object]:
    """Return the facts that have to be the same in all processes, by the names that users know."""
    tensors = [*structure.tensors, *structure.rest]
    (optimizer,) = strategy.optimizers
    by_name: dict[str, object] = {
        "the version of lt_offload": f"{version('lt-offload')} (profile {PROFILE_SCHEMA}, plan {PLAN_SCHEMA})",
        "the version of torch": str(torch.__version__),
        "the kernels of layers (model.kernels)": kernels_of(trainer.lightning_module) or "their own code",
        "devices": trainer.num_devices,
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm),
        "the number of blocks": len(structure.blocks),
        "the set of parameters": tuple(
            f"{name} {str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for name, p in tensors
        ),
        "the set of trainable parameters": tuple(name for name, p in tensors if p.requires_grad),
        "the optimizer": type(optimizer).__name__,
        "the number of parameters in the optimizer": sum(len(group["params"]) for group in optimizer.param_groups),
        "batch_size": strategy.batch_size,
        "max_batch_size": strategy.max_batch_size,
        "micro_batches": strategy.micro_batches,
        "tile_tokens": strategy.tile_tokens,
        "plan": None if strategy.plan_path is None else str(strategy.plan_path),
    }
    return by_name | strategy.settings.values()


def changeable(optimizers: Sequence[Optimizer]) -> dict[str, object]:
    """Return the options of ``optimizers`` by names for users: schedulers and callbacks change them while training."""
    return {
        f"{name!r} of the optimizer's parameter group {index}": plain
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and (plain := _plain(value)) is not _OTHER
    }


_OTHER = object()
"""A mark of options with another text in each process: functions, objects."""


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        items = tuple(map(_plain, value))
        return _OTHER if _OTHER in items else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else _OTHER


def compare(all_facts: Sequence[Mapping[str, object]]) -> None:
    """Check that all processes have said the same; raises ``ConfigError`` with the values that differ."""
    first = all_facts[0]
    for name in {name: None for facts in all_facts for name in facts}:
        value = first.get(name)
        for rank, facts in enumerate(all_facts):
            other = facts.get(name)
            if other != value:
                raise ConfigError(
                    f"{name} differs between the processes of this run: process 0 has {_told(value, other)}, process "
                    f"{rank} {_told(other, value)}; give all of them the same code, settings and data"
                )


def _told(value: object, other: object) -> str:
    """Return ``value`` for people; of long lists what ``other`` has not."""
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) + len(other) > 6:
        own = [one for one in value if one not in other]
        return f"{len(value)}, among them {', '.join(map(str, own[:3]))}" if own else f"{len(value)}"
    return repr(value)
