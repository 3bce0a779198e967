"""Tokenised documents, as they lie in a data set: in memory, or in memory-mapped Arrow files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lt_offload.finetune.data.formats import IGNORED, Example

if TYPE_CHECKING:
    from datasets import Dataset

Tokens = NDArray[Any]
Integers = NDArray[np.int64]
_AT_ONCE = 1000
"""Documents that are read at a time."""
MOST_NAMED = 3
"""Rows that a message names."""


class Documents(Sequence[Example]):
    """Tokenised rows, in order: the columns ``ids``, ``labels`` and ``place`` (file and row) of a data set.

    ``bad`` is the number of rows that were left out.
    """

    def __init__(self, dataset: Dataset, *, bad: int = 0) -> None:
        self.dataset = dataset
        self.bad = bad
        self._rows = dataset.select_columns(["ids", "labels"]).with_format("arrow")
        self.lengths = _joined([lengths for lengths, _ in self._labels()])
        """Tokens of each document."""

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> Documents:
        """Return ``examples`` as documents."""
        from datasets import Dataset, Features, List, Value, concatenate_datasets

        rest = iter(examples)
        tokens = List(Value("int32"))
        features = Features({"ids": tokens, "labels": tokens, "place": Value("string")})
        parts = [Dataset.from_dict({name: [] for name in features}, features=features)]
        while some := list(islice(rest, _AT_ONCE)):
            columns = {name: [getattr(each, name) for each in some] for name in features}
            parts.append(Dataset.from_dict(columns, features=features))
        return cls(concatenate_datasets(parts))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.dataset[index]
        return Example(ids=row["ids"], labels=row["labels"], place=row["place"])

    def select(self, numbers: Integers) -> Documents:
        """Return the documents with these ``numbers``."""
        return Documents(self.dataset.select(numbers))

    def read(self, documents: Sequence[int]) -> list[tuple[Tokens, Tokens]]:
        """Return ids and labels of some documents."""
        some = self._rows[list(documents)]
        columns = ([tokens.values.to_numpy() for tokens in some[name]] for name in ("ids", "labels"))
        return list(zip(*columns, strict=True))

    def trained(self, most: int) -> tuple[Integers, Integers]:
        """Return the number of learned tokens of each document: in all, and of the first ``most`` tokens.

        The first token is never learned, as nothing comes before it.
        """
        whole, cut = [], []
        for lengths, labels in self._labels():
            # With sums up to every token, how many of any stretch are
            # learned is one difference, for all documents at once.
            sums = np.concatenate([[0], np.cumsum(labels != IGNORED)])
            end = np.cumsum(lengths)
            begin = end - lengths
            second = np.minimum(begin + 1, end)
            whole.append(sums[end] - sums[second])
            cut.append(sums[np.minimum(end, np.maximum(begin + most, second))] - sums[second])
        return _joined(whole), _joined(cut)

    def _labels(self) -> Iterator[tuple[Integers, Tokens]]:
        """Yield the lengths and labels of all documents, some at a time."""
        for batch in self._rows.iter(_AT_ONCE):
            column = batch["labels"].combine_chunks()
            yield column.value_lengths().to_numpy().astype(np.int64), column.flatten().to_numpy()


def named(documents: Documents, numbers: Integers, text: str) -> str:
    """Return ``text`` with the files and rows of the first ones of these ``numbers``; nothing if there are none."""
    places = [documents[int(number)].place for number in numbers[:MOST_NAMED]]
    return text.format(", ".join(places) + ", ..." * (len(numbers) > MOST_NAMED)) if places else ""


def _joined(arrays: Sequence[Integers]) -> Integers:
    return np.concatenate([np.empty(0, np.int64), *arrays])
