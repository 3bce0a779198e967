"""Other holders of the memory of a model's weights, when an engine takes them over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import address_of, storage_uses
from lt_offload.machine.accounting import tensors_in
from lt_offload.model.blocks import Structure


def held_by_others(model: nn.Module, structure: Structure, device: torch.device) -> frozenset[int]:
    """Return the weights that a kept state dict or array shows as they are trained, as it does in plain PyTorch.

    On a GPU it does not: there the weights move to the device, and what is kept stays as it was. So it does here.
    """
    if device.type != "cpu":
        return frozenset()
    rest = (param for _, param in structure.rest)
    return find_aliases([param for _, param in structure.tensors], [*rest, *model.buffers()])


def find_aliases(weights: Sequence[Tensor], others: Iterable[Tensor]) -> frozenset[int]:
    """Return which weights are held by others: in tensors, arrays, capsules of dlpack, or other processes.

    A NumPy array that a weight was made of is not found: the array owns the memory, and nobody tells how many use it.
    ``others`` are the model's other parameters and its buffers.
    """
    storages = [weight.untyped_storage() for weight in weights]
    own = Counter(address_of(storage) for storage in storages)
    parts = (part for other in others for part in tensors_in(other) if part.device.type == "cpu")
    own.update(address_of(part.untyped_storage()) for part in parts)
    lone = torch.empty(1)
    # The uses that torch counts for memory of one tensor, the handle that asks included.
    alone = storage_uses(lone.untyped_storage())
    return frozenset(
        index
        for index, storage in enumerate(storages)
        if storage.is_shared() or storage_uses(storage) - alone + 1 > own[address_of(storage)]
    )
