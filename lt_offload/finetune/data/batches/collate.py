"""Batches of rows: all of one width if they are packed, as wide as their longest row if they are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lt_offload.finetune.data.batches.packing import Row
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.units import round_up

_PAD_MULTIPLE = 8
"""The divisor of a padded batch's columns: few different shapes, and efficient ones."""


def padded_width(longest: int, most: int) -> int:
    """Return the columns of a padded batch whose longest row has ``longest`` tokens; rows have ``most`` at most."""
    return min(round_up(longest, _PAD_MULTIPLE), most)


class Fill:
    """Collate packed rows: as wide as a row can be, the rest without loss.

    Nothing is masked, so that models find the documents by their positions. The rest of a row is a document of its own.

    Args:
        pad_id: token in the rest of a row.
        length: of a full row.
        positions: whether batches have ``position_ids``, which begin again with each document.
    """

    def __init__(self, pad_id: int, length: int, *, positions: bool) -> None:
        self.pad_id = pad_id
        self.length = length
        self.positions = positions

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch of ``rows``."""
        shape = (len(rows), self.length)
        batch = {"input_ids": torch.full(shape, self.pad_id), "labels": torch.full(shape, IGNORED)}
        if self.positions:
            batch["position_ids"] = torch.empty(shape, dtype=torch.long)
        for number, (ids, labels, positions) in enumerate(rows):
            batch["input_ids"][number, : len(ids)] = ids
            batch["labels"][number, : len(ids)] = labels
            if self.positions:
                batch["position_ids"][number, : len(ids)] = positions
                batch["position_ids"][number, len(ids) :] = torch.arange(self.length - len(ids))
        return batch


class Pad:
    """Collate rows of different lengths: padded on the right, masked, without loss there."""

    def __init__(self, pad_id: int, length: int) -> None:
        self.pad_id = pad_id
        self.length = length

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch as wide as its longest row, rounded up."""
        width = padded_width(max(len(ids) for ids, _, _ in rows), self.length)
        batch = {
            "input_ids": torch.full((len(rows), width), self.pad_id),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
            "labels": torch.full((len(rows), width), IGNORED),
        }
        for number, (ids, labels, _) in enumerate(rows):
            batch["input_ids"][number, : len(ids)] = ids
            batch["attention_mask"][number, : len(ids)] = 1
            batch["labels"][number, : len(ids)] = labels
        return batch
