"""Batches of rows: all of one width if they are packed, as wide as their longest row if they are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lt_offload.finetune.data.batches.packing import Pack, Row
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.units import round_up

_PAD_MULTIPLE = 8
"""The divisor of a padded batch's columns: few different shapes, and efficient ones."""


def padded_width(longest: int, most: int) -> int:
    """Return the columns of a padded batch whose longest row has ``longest`` tokens; rows have ``most`` at most."""
    return min(round_up(longest, _PAD_MULTIPLE), most)


class Collate:
    """Rows as a batch: packed ones as wide as a row can be, others as their longest row, rounded up.

    Packed rows are not masked, so that models find the documents by ``position_ids``, which begin again with each. The
    rest of a row is a document of its own. Other rows are padded on the right, and masked there. Neither has a loss.

    Args:
        pad_id: token in the rest of a row.
        length: of a full row.
        pack: ``data.pack``.
    """

    def __init__(self, pad_id: int, length: int, pack: Pack) -> None:
        self.pad_id = pad_id
        self.length = length
        self.pack = pack

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch of ``rows``."""
        width = self.length if self.pack else padded_width(max(len(ids) for ids, _, _ in rows), self.length)
        shape = (len(rows), width)
        batch = {"input_ids": torch.full(shape, self.pad_id)}
        if not self.pack:
            batch["attention_mask"] = torch.zeros(shape, dtype=torch.long)
        batch["labels"] = torch.full(shape, IGNORED)
        if self.pack is True:
            batch["position_ids"] = torch.empty(shape, dtype=torch.long)
        for number, (ids, labels, positions) in enumerate(rows):
            end = len(ids)
            batch["input_ids"][number, :end] = ids
            batch["labels"][number, :end] = labels
            if not self.pack:
                batch["attention_mask"][number, :end] = 1
            elif self.pack is True:
                batch["position_ids"][number] = torch.cat([positions, torch.arange(width - end)])
        return batch
