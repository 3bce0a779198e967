from __future__ import annotations

import pytest
import torch

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.loaders import ResumableBatches
from lt_offload.finetune.data.packing import Pad, Sequences, pack, stack


def examples(*lengths: int) -> list[Example]:
    tokens = iter(range(1, sum(lengths) + 1))
    return [Example(ids=(ids := [next(tokens) for _ in range(n)]), labels=[-i for i in ids]) for n in lengths]


def test_packing_loses_nothing_but_the_rest() -> None:
    packed = list(pack(examples(3, 9, 1, 4), 5))
    assert [len(e.ids) for e in packed] == [5, 5, 5]
    assert [token for e in packed for token in e.ids] == list(range(1, 16))
    assert all(label == -token for e in packed for token, label in zip(e.ids, e.labels, strict=True))


def test_sequences_give_back_what_they_were_made_of() -> None:
    made = examples(3, 1, 4)
    sequences = Sequences(made)
    assert len(sequences) == 3
    for index, example in enumerate(made):
        ids, labels = sequences[index]
        assert ids.tolist() == example.ids
        assert labels.tolist() == example.labels
        assert ids.dtype == labels.dtype == torch.int64
    assert len(Sequences([])) == 0


def test_stack_has_no_mask() -> None:
    sequences = Sequences(examples(4, 4))
    batch = stack([sequences[0], sequences[1]])
    assert sorted(batch) == ["input_ids", "labels"]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(("lengths", "width"), [((3, 9), 16), ((8, 2), 8), ((20, 1), 20)])
def test_padding(lengths: tuple[int, int], width: int) -> None:
    sequences = Sequences(examples(*lengths))
    batch = Pad(0, 20)([sequences[0], sequences[1]])
    assert {t.shape for t in batch.values()} == {(2, width)}
    for row, length in enumerate(lengths):
        assert batch["input_ids"][row, :length].tolist() == sequences[row][0].tolist()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (width - length)
        assert batch["labels"][row, length:].tolist() == [IGNORED] * (width - length)
        assert batch["input_ids"][row, length:].eq(0).all()


def test_order_depends_on_seed_and_epoch_only() -> None:
    def epoch(seed: int, number: int) -> list[list[int]]:
        batches = ResumableBatches(11, 2, seed=seed)
        batches.set_epoch(number)
        return list(batches)

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 1) == epoch(1, 0) != epoch(0, 0)
    flat = [index for batch in epoch(0, 0) for index in batch]
    assert len(flat) == len(set(flat)) == 10
    assert len(ResumableBatches(11, 2, seed=0)) == 5


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_order_continues_in_the_middle(taken: int) -> None:
    whole = ResumableBatches(11, 2, seed=3)
    whole.set_epoch(2)
    iterator = iter(whole)
    begun = [next(iterator) for _ in range(taken)]
    resumed = ResumableBatches(11, 2, seed=3)
    resumed.load_state_dict(whole.state_dict())
    rest = iter(resumed)
    resumed.set_epoch(2)  # Lightning sets the epoch after it has asked for the iterator
    assert begun + list(rest) == list(_fresh(2))
    assert list(resumed) == list(_fresh(2)), "the next epoch is whole again"


def test_order_at_the_end_of_an_epoch_starts_the_next_one_whole() -> None:
    whole = ResumableBatches(11, 2, seed=3)
    list(whole)
    resumed = ResumableBatches(11, 2, seed=3)
    resumed.load_state_dict(whole.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == list(_fresh(1))


@pytest.mark.parametrize("change", [{"count": 12}, {"batch_size": 3}, {"seed": 4}])
def test_another_order_is_not_continued(change: dict[str, int]) -> None:
    state = ResumableBatches(11, 2, seed=3).state_dict() | change
    with pytest.raises(ConfigError, match=next(iter(change))):
        ResumableBatches(11, 2, seed=3).load_state_dict(state)


def _fresh(epoch: int) -> ResumableBatches:
    batches = ResumableBatches(11, 2, seed=3)
    batches.set_epoch(epoch)
    return batches
