"""Sizes of batches, by which a plan has room for one or not."""

from __future__ import annotations

import math

import torch

from lt_offload.model.batch import Size, shape


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
