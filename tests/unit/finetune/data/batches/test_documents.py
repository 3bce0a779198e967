from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from lt_offload.finetune.data import sequences as room
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.sequences import Documents

MADE = [
    Example(ids=list(range(begin, begin + length)), labels=[IGNORED] * prompt + list(range(length - prompt)))
    for begin, length, prompt in [(5, 3, 0), (9, 1, 0), (20, 7, 3), (40, 0, 0), (50, 4, 4), (60, 2, 1)]
]


def check(documents: Documents, numbers: list[int]) -> None:
    made = [MADE[number] for number in numbers]
    assert len(documents) == len(made)
    assert documents.lengths.tolist() == [len(each.ids) for each in made]
    for example, (ids, labels) in zip(made, documents.read(range(len(made))), strict=True):
        assert (ids.tolist(), labels.tolist()) == (example.ids, example.labels)
    whole, cut = documents.trained(4)
    assert whole.tolist() == [[2, 0, 4, 0, 0, 1][number] for number in numbers]
    assert cut.tolist() == [[2, 0, 1, 0, 0, 1][number] for number in numbers]


def test_documents_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Documents.from_examples(iter(MADE)), list(range(6)))
    monkeypatch.setattr(room, "_AT_ONCE", 2)
    check(Documents.from_examples(MADE), list(range(6)))
    assert len(Documents.from_examples([])) == 0


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4, 5], [1, 2, 3], [4, 2, 0]])
def test_documents_of_a_data_set(tmp_path: Path, numbers: list[int]) -> None:
    """Arrays that do not begin where their memory does, and rows in another order."""
    Dataset.from_list([{"ids": each.ids, "labels": each.labels, "second": 0} for each in MADE]).save_to_disk(tmp_path)
    check(Documents(Dataset.load_from_disk(tmp_path)).select(np.array(numbers)), numbers)
