"""Whether a block is called with what the block before returned. Knows tensors only."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class BlockOutput:
    """What a block returned, to be recognised among the arguments of the next one; keeps nothing alive."""

    def __init__(self, out: Any) -> None:
        self._known = [(weakref.ref(t.untyped_storage()), _describe(t)) for t in tensors_of(out)]

    def sources(self, inputs: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Return, per input, which of the returned tensors it is, untouched.

        None if one of them is something else, or there are none: running the block before again would give nothing.
        """
        found = [self._source(tensor) for tensor in inputs]
        known = tuple(at for at in found if at is not None)
        return known if known and len(known) == len(found) else None

    def _source(self, tensor: Tensor) -> int | None:
        storage, description = tensor.untyped_storage(), _describe(tensor)
        matches = (i for i, (ref, known) in enumerate(self._known) if ref() is storage and known == description)
        return next(matches, None)


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors among what a block returned, in their order."""
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def version(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been written to."""
    return 0 if tensor.is_inference() else tensor._version


def _describe(tensor: Tensor) -> tuple[torch.dtype, int, torch.Size, tuple[int, ...], int]:
    return tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(), version(tensor)
