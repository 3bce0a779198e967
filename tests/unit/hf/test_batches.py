"""The batch that is planned for: the largest that the data can give."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from lt_offload.hf import batches
from lt_offload.model.batch import Size, shape
from scripts.hf import cases

ROWS = cases.rows(20)


def loader(dataset: Any) -> Any:
    return SimpleNamespace(dataset=dataset, collate_fn=cases.collate)


@pytest.mark.parametrize("dataset", [ROWS, Dataset.from_list(ROWS)], ids=["a list", "datasets"])
def test_it_is_of_the_longest_rows_and_has_padding(dataset: Any) -> None:
    first = cases.collate(ROWS[:2])
    found = batches.largest(SimpleNamespace(_train_batch_size=2), loader(dataset), first)
    assert found["input_ids"].shape == (2, max(len(row["input_ids"]) for row in ROWS))
    assert not found["attention_mask"].all()


def test_columns_that_are_put_one_after_another_count_together() -> None:
    data = Dataset.from_dict({"prompt": [[1] * 9, [1] * 5, [1]], "answer": [[1], [1] * 6, [1] * 8]})

    def collate(rows: Any) -> Any:
        return {"input_ids": torch.zeros(len(rows), max(len(row["prompt"]) + len(row["answer"]) for row in rows))}

    found = batches.of_rows(SimpleNamespace(dataset=data, collate_fn=collate), 1)
    assert max(batch["input_ids"].shape for batch in found) == (1, 11)


def test_data_whose_lengths_nobody_knows_are_not_read() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("it was read")

    assert batches.of_rows(loader(Rows()), 2) == []


def test_a_larger_batch_and_the_first_with_padding_are_not_covered() -> None:
    full = {"input_ids": torch.ones(2, 8).long(), "attention_mask": torch.ones(2, 8)}
    padded = {"input_ids": torch.ones(2, 6).long(), "attention_mask": torch.ones(2, 6).triu()}
    longer = {"input_ids": torch.ones(1, 9).long()}
    assert Size.of(full).ratio(Size.of(full)) == 1
    assert Size.of(full).ratio(Size.of(padded)) == math.inf
    assert Size.of(padded).ratio(Size.of(full)) == (2 * 8 * 8) / (2 * 6 * 6)
    assert Size.of(full).ratio(Size.of(longer)) == max(81 / 128, 9 / 16)


def test_of_two_columns_of_tokens_the_longer_one_counts() -> None:
    """As ORPO's collator gives them: below one another, filled up to the longest of both."""

    def answers(chosen: int, rejected: int) -> dict[str, torch.Tensor]:
        made = {"chosen": torch.ones(2, chosen).long(), "rejected": torch.ones(2, rejected).long()}
        return {f"{name}_{kind}": ids for name, ids in made.items() for kind in ("input_ids", "attention_mask")}

    known = Size.of(answers(9, 4))
    assert known.ratio(Size.of(answers(4, 9))) == 1
    assert known.ratio(Size.of(answers(3, 10))) > 1
    assert max([answers(8, 5), answers(3, 10)], key=Size.of)["rejected_input_ids"].shape == (2, 10)
    assert shape(answers(3, 10)) == "2 x 10, padded"
