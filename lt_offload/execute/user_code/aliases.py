"""Other holders of the memory of a model's weights, when an engine takes them over."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import DisableTorchFunctionSubclass, address_of, base_of, has_storage, storage_uses
from lt_offload.machine.accounting import tensors_in
from lt_offload.model.blocks import Structure


@dataclass(frozen=True, kw_only=True, slots=True)
class Aliases:
    """The weights whose memory somebody else holds when an engine takes them over: a kept state dict, a NumPy array."""

    held: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()
    """By something else than tensors, so that no operation on them shows when it is read or written."""


def held_by_others(model: nn.Module, structure: Structure, device: torch.device) -> Aliases:
    """Return the weights that a kept state dict or array shows as they are trained, as it does in plain PyTorch.

    On a GPU it does not: there the weights move to the device, and what is kept stays as it was. So it does here.
    """
    if device.type != "cpu":
        return Aliases()
    rest = (param for _, param in structure.rest)
    return find_aliases([param for _, param in structure.tensors], [*rest, *model.buffers()])


def find_aliases(weights: Sequence[Tensor], others: Iterable[Tensor]) -> Aliases:
    """Return which weights are held by others.

    A NumPy array that a weight was made of is not found: the array owns the memory, and nobody tells how many use it.

    Args:
        weights: parameters of a model, on the host.
        others: its other parameters and its buffers.
    """
    storages = [weight.untyped_storage() for weight in weights]
    own = Counter(address_of(storage) for storage in storages)
    parts = (part for other in others for part in tensors_in(other) if part.device.type == "cpu")
    own.update(address_of(part.untyped_storage()) for part in parts)
    lone = torch.empty(1)
    # What torch counts for memory that one tensor has, the handle that asks included.
    alone = _count(lone.untyped_storage())
    extra = {address_of(s): _count(s) - alone + 1 - own[address_of(s)] for s in storages}
    extra = {key: count for key, count in extra.items() if count > 0}
    shared = {address_of(storage) for storage in storages if storage.is_shared()}
    # Torch marks what NumPy has a view of.
    unseen = shared | {address_of(s) for s in storages if address_of(s) in extra and not s.resizable()}
    unseen |= _not_in_python(extra, own) if extra.keys() - unseen else set()
    keys = [address_of(storage) for storage in storages]
    return Aliases(
        held=frozenset(index for index, key in enumerate(keys) if key in extra or key in shared),
        unseen=frozenset(index for index, key in enumerate(keys) if key in unseen),
    )


def _not_in_python(extra: dict[int, int], own: Counter[int]) -> set[int]:
    """Return the storages that more than the model's tensors and those in objects of Python hold: dlpack's capsules.

    Python does not say which tensors the variables of running functions hold: memory that only such a variable has is
    counted as held from outside Python.
    """
    objects = gc.get_objects()
    referred = set(map(id, gc.get_referents(*objects)))
    with DisableTorchFunctionSubclass():
        tensors = [t for t in objects if issubclass(type(t), Tensor) and id(t) in referred]
        tensors = [*{id(t): t for t in (*tensors, *(base_of(t) for t in tensors if base_of(t) is not None))}.values()]
        stored = [t for t in tensors if has_storage(t) and t.device.type == "cpu"]
        seen = Counter(address_of(tensor.untyped_storage()) for tensor in stored)
    return {key for key, count in extra.items() if count + own[key] > seen[key]}


def _count(storage: torch.UntypedStorage) -> int:
    return storage_uses(storage)
