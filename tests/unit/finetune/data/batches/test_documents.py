from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from lt_offload.finetune.data.batches import documents as room
from lt_offload.finetune.data.batches.documents import Documents
from lt_offload.finetune.data.formats import IGNORED, Example

MADE = [
    Example(ids=list(range(begin, begin + length)), labels=[IGNORED] * prompt + list(range(length - prompt)))
    for begin, length, prompt in [(5, 3, 0), (9, 1, 0), (20, 7, 3), (40, 0, 0), (50, 4, 4), (60, 2, 1)]
]


def of_examples() -> Documents:
    return Documents.from_examples(iter(MADE))


def of_a_data_set(folder: Path) -> Documents:
    Dataset.from_list([{"ids": each.ids, "labels": each.labels} for each in MADE]).save_to_disk(folder)
    return Documents.from_dataset(Dataset.load_from_disk(folder))


def check(documents: Documents) -> None:
    assert len(documents) == len(MADE)
    assert documents.lengths.tolist() == [3, 1, 7, 0, 4, 2]
    for number, example in enumerate(MADE):
        ids, labels = documents.piece(number, 0, len(example.ids))
        assert (ids.tolist(), labels.tolist()) == (example.ids, example.labels)
    assert documents.piece(2, 2, 5)[0].tolist() == [22, 23, 24]
    whole, cut = documents.trained(4)
    assert whole.tolist() == [2, 0, 4, 0, 0, 1]
    assert cut.tolist() == [2, 0, 1, 0, 0, 1]


def test_documents_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    check(of_examples())
    monkeypatch.setattr(room, "_CHUNK_TOKENS", 4)  # several arrays
    check(of_examples())
    assert len(Documents.from_examples([])) == 0


def test_documents_of_a_data_set_are_where_they_lie(tmp_path: Path) -> None:
    documents = of_a_data_set(tmp_path)
    check(documents)
    ids, labels = documents.piece(2, 0, 7)
    assert not ids.flags.owndata
    assert not ids.flags.writeable, "it is a file's memory"
    assert not labels.flags.writeable


def test_a_part_of_a_data_set(tmp_path: Path) -> None:
    """Arrays that do not begin where their memory does, and rows in another order."""
    Dataset.from_list([{"ids": each.ids, "labels": each.labels} for each in MADE]).save_to_disk(tmp_path)
    dataset = Dataset.load_from_disk(tmp_path)
    for numbers in ([1, 2, 3], [4, 2, 0]):
        documents = Documents.from_dataset(dataset.select(numbers))
        for number, made in enumerate(numbers):
            ids, labels = documents.piece(number, 0, len(MADE[made].ids))
            assert (ids.tolist(), labels.tolist()) == (MADE[made].ids, MADE[made].labels)
            assert not ids.flags.writeable, "it is a file's memory"
        assert documents.lengths.tolist() == [len(MADE[made].ids) for made in numbers]
        assert np.array_equal(documents.trained(4)[0], of_examples().trained(4)[0][numbers])
