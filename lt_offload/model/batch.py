"""How large a batch is: what a plan's memory grows with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lt_offload.model.parts import extent


@dataclass(frozen=True, order=True, slots=True)
class Size:
    """What the memory for a batch grows with, the most important first."""

    squares: int
    """Rows times the square of their length: masks and scores. Of the longest column."""
    tokens: int
    """Of all columns."""
    padded: bool
    """Whether rows are filled up, so that attention has a mask; models leave one out that hides nothing."""

    @classmethod
    def of(cls, batch: Any) -> Size:
        """Return the size of ``batch``."""
        columns = _extents(batch)
        return cls(
            squares=max(rows * length * length for rows, length in columns),
            tokens=sum(rows * length for rows, length in columns),
            padded=_is_padded(batch),
        )

    def covers(self, batch: Any) -> bool:
        """Return whether a batch of this size is larger than ``batch``, or as large."""
        other = Size.of(batch)
        fits = other.squares <= self.squares and other.tokens <= self.tokens
        return fits and (self.padded or not other.padded)

    def beside(self, other: Size) -> Size:
        """Return the larger of each."""
        return Size(max(self.squares, other.squares), max(self.tokens, other.tokens), self.padded or other.padded)


def _extents(batch: Any) -> list[tuple[int, int]]:
    """Return rows and length of every column of tokens: chosen and rejected answers are several."""
    named = _columns(batch, "input_ids")
    return [extent({"input_ids": column}) for column in named] or [extent(batch)]


def _is_padded(batch: Any) -> bool:
    """Return whether rows are filled up, or will be where columns are put below one another."""
    masks = _columns(batch, "attention_mask")
    return not all(bool(mask.all()) for mask in masks) or len({length for _, length in _extents(batch)}) > 1


def _columns(batch: Any, kind: str) -> list[Tensor]:
    if not isinstance(batch, Mapping):
        return []
    return [value for name, value in batch.items() if str(name).endswith(kind) and isinstance(value, Tensor)]


def shape(batch: Any) -> str:
    """Return what people call the size of ``batch``."""
    rows, length = max(_extents(batch), key=lambda column: column[1])
    return f"{rows} x {length}" + ", padded" * _is_padded(batch)
