"""Tokenised documents, one after the other in large arrays: in memory, or as they lie in memory-mapped Arrow files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lt_offload.compat.hugging_face import row_indices
from lt_offload.finetune.data.formats import IGNORED, Example

if TYPE_CHECKING:
    from datasets import Dataset

Tokens = NDArray[Any]
_CHUNK_TOKENS = 1 << 22
"""Tokens of examples that are put into one array: what is worked on at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Some documents side by side: document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Tokens
    labels: Tokens
    offsets: NDArray[np.int64]


class Documents:
    """Ids and labels of many documents. Nothing is copied that is an array already.

    Args:
        chunks: where they are.
        order: which of those in ``chunks`` they are, one after the other; None: all.
    """

    def __init__(self, chunks: Sequence[Chunk], order: NDArray[Any] | None = None) -> None:
        self._chunks = [chunk for chunk in chunks if len(chunk.offsets) > 1]
        counts = [len(chunk.offsets) - 1 for chunk in self._chunks]
        self._first = np.cumsum([0, *counts])
        self._order: Any = slice(None) if order is None else order
        self.lengths: NDArray[np.int64] = _joined([np.diff(chunk.offsets) for chunk in self._chunks])[self._order]
        """Tokens of each document."""

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> Documents:
        """Return the documents that ``examples`` are."""
        return cls([_chunk(some) for some in _by_size(examples)])

    @classmethod
    def from_dataset(cls, dataset: Dataset, ids: str = "ids", labels: str = "labels") -> Documents:
        """Return the documents in two columns of a data set: lists of integers, read where they lie."""
        # A data set of which rows were taken still has the whole table, and beside it the numbers of its rows.
        chosen = row_indices(dataset)
        order = None if chosen is None else chosen.column(0).to_numpy()
        chunks = []
        for batch in dataset.data.table.select([ids, labels]).to_batches():
            columns = [batch.column(0), batch.column(1)]
            for column in columns:
                assert column.null_count == 0, "an example has ids and labels"
            # A batch may be a slice of a longer one: its offsets begin where
            # it does, and need not be those of its other column.
            offsets, others = (column.offsets.to_numpy().astype(np.int64) for column in columns)
            assert np.array_equal(np.diff(offsets), np.diff(others)), "ids and labels are of one length"
            begin, end = int(offsets[0]), int(offsets[-1])
            chunks.append(
                Chunk(
                    ids=columns[0].values.to_numpy(zero_copy_only=True)[begin:end],
                    labels=columns[1].values.to_numpy(zero_copy_only=True)[int(others[0]) : int(others[-1])],
                    offsets=offsets - begin,
                )
            )
        return cls(chunks, order)

    def __len__(self) -> int:
        return len(self.lengths)

    def piece(self, document: int, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """Return ids and labels of the tokens ``start`` to ``stop`` of one document, as views."""
        if not isinstance(self._order, slice):
            document = int(self._order[document])
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        chunk = self._chunks[number]
        begin = int(chunk.offsets[document - int(self._first[number])])
        return chunk.ids[begin + start : begin + stop], chunk.labels[begin + start : begin + stop]

    def trained(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many tokens of each document are learned: in all, and of the first ``most`` tokens.

        The first token never is: nothing comes before it.
        """
        whole, cut = [], []
        for chunk in self._chunks:
            # With sums up to every token, how many of any stretch are
            # learned is one difference, for all documents at once.
            sums = np.zeros(len(chunk.labels) + 1, np.int64)
            np.cumsum(chunk.labels != IGNORED, out=sums[1:])
            begin, end = chunk.offsets[:-1], chunk.offsets[1:]
            second = np.minimum(begin + 1, end)
            whole.append(sums[end] - sums[second])
            cut.append(sums[np.minimum(end, np.maximum(begin + most, second))] - sums[second])
        return _joined(whole)[self._order], _joined(cut)[self._order]


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *arrays])


def _by_size(examples: Iterable[Example]) -> Iterator[list[Example]]:
    some: list[Example] = []
    tokens = 0
    for example in examples:
        some.append(example)
        tokens += len(example.ids)
        if tokens >= _CHUNK_TOKENS:
            yield some
            some, tokens = [], 0
    yield some


def _chunk(examples: Sequence[Example]) -> Chunk:
    lengths = [len(example.ids) for example in examples]
    offsets = np.cumsum([0, *lengths])
    ids, labels = np.empty(int(offsets[-1]), np.int32), np.empty(int(offsets[-1]), np.int32)
    for example, begin, end in zip(examples, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids[begin:end], labels[begin:end] = example.ids, example.labels
    return Chunk(ids=ids, labels=labels, offsets=offsets)
