"""Makes training sequences from tokenised examples, and batches from sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lt_offload.finetune.data.formats import IGNORED, Example

PAD_MULTIPLE = 8
"""Padded batches have a multiple of this many columns: few different shapes, and friendly ones."""


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of ids and labels in two flat arrays: item ``i`` is ``(ids, labels)``."""

    def __init__(self, examples: Iterable[Example]) -> None:
        ids: list[NDArray[np.int32]] = []
        labels: list[NDArray[np.int32]] = []
        for example in examples:
            ids.append(np.asarray(example.ids, dtype=np.int32))
            labels.append(np.asarray(example.labels, dtype=np.int32))
        self._ends = np.cumsum([0, *map(len, ids)])
        self._ids = np.concatenate([np.empty(0, np.int32), *ids])
        self._labels = np.concatenate([np.empty(0, np.int32), *labels])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        where = slice(self._ends[index], self._ends[index + 1])
        ids, labels = self._ids[where].astype(np.int64), self._labels[where].astype(np.int64)
        return torch.from_numpy(ids), torch.from_numpy(labels)


def pack(examples: Iterable[Example], length: int) -> Iterator[Example]:
    """Yield full sequences of ``length`` tokens, cut from the examples one after the other; an unfilled rest is lost.

    A sequence may hold the end of one document and the beginning of the next; attention sees both.
    """
    ids: list[int] = []
    labels: list[int] = []
    for example in examples:
        ids += example.ids
        labels += example.labels
        while len(ids) >= length:
            yield Example(ids=ids[:length], labels=labels[:length])
            ids, labels = ids[length:], labels[length:]


def stack(items: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Collate packed sequences: all of one length, nothing to mask."""
    return {"input_ids": torch.stack([ids for ids, _ in items]), "labels": torch.stack([labels for _, labels in items])}


class Pad:
    """Collate sequences of different lengths: padded on the right, masked, without loss there."""

    def __init__(self, pad_id: int, length: int) -> None:
        self.pad_id = pad_id
        self.length = length

    def __call__(self, items: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Return a batch as wide as its longest sequence, rounded up."""
        longest = max(len(ids) for ids, _ in items)
        width = min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, self.length)
        batch = {
            "input_ids": torch.full((len(items), width), self.pad_id),
            "attention_mask": torch.zeros((len(items), width), dtype=torch.long),
            "labels": torch.full((len(items), width), IGNORED),
        }
        for row, (ids, labels) in enumerate(items):
            batch["input_ids"][row, : len(ids)] = ids
            batch["attention_mask"][row, : len(ids)] = 1
            batch["labels"][row, : len(ids)] = labels
        return batch
