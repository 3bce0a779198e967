"""The size of a batch, with which a plan's memory grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lt_offload.compat.torch import tree_leaves
from lt_offload.model.parts import extent


@dataclass(frozen=True, order=True, slots=True)
class Size:
    """Quantities that the memory for a batch grows with, the most important first."""

    squares: int
    """Rows times the square of their length: masks and scores. Of the longest column."""
    tokens: int
    """Tokens of all columns; of a column that is not made of tokens, its numbers."""
    padded: bool
    """True if attention has a mask, as rows are filled up or hold several texts; what hides nothing is left out."""

    @classmethod
    def of(cls, batch: Any, padded: bool | None = None) -> Size:
        """Return the size of ``batch``; to see whether it has padding, on a GPU, would wait for the device."""
        columns = _extents(batch)
        return cls(
            squares=max((rows * length * length for rows, length in columns), default=0),
            tokens=sum(rows * length for rows, length in columns),
            padded=is_padded(batch) if padded is None else padded,
        )

    def ratio(self, other: Size) -> float:
        """Return how many times the memory of this size a batch of the ``other`` may need; infinite if unknown."""
        if other.padded and not self.padded:
            return math.inf  # attention takes another way
        pairs = (self.squares, other.squares), (self.tokens, other.tokens)
        return max(needed / max(own, 1) for own, needed in pairs)


def _extents(batch: Any) -> list[tuple[int, int]]:
    """Return rows and length of every column of tokens: chosen and rejected answers are several."""
    named = _columns(batch, "input_ids")
    if named:
        return [extent({"input_ids": column}) for column in named]
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel()]
    return [(len(tensor), tensor.numel() // len(tensor)) if tensor.ndim else (1, 1) for tensor in tensors]


def is_padded(batch: Any) -> bool:
    """Return whether rows are filled up, or will be where columns are put below one another, or hold several texts."""
    masks, lengths = _columns(batch, "attention_mask"), {column.shape[-1:] for column in _columns(batch, "input_ids")}
    begins_again = any(ids.ndim and bool((ids.diff() < 0).any()) for ids in _columns(batch, "position_ids"))
    return not all(bool(mask.all()) for mask in masks) or len(lengths) > 1 or begins_again


def _columns(batch: Any, kind: str) -> list[Tensor]:
    if not isinstance(batch, Mapping):
        return []
    return [value for name, value in batch.items() if str(name).endswith(kind) and isinstance(value, Tensor)]


def shape(batch: Any) -> str:
    """Return what people call the size of ``batch``: the shape of its longest column, or of its largest tensor."""
    named, tensors = _columns(batch, "input_ids"), [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    of = max(named, key=lambda column: column.shape[-1]) if named else max(tensors, key=Tensor.numel)
    return " x ".join(map(str, of.shape)) + ", padded" * is_padded(batch)
