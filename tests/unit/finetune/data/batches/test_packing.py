from __future__ import annotations

import numpy as np
import pytest

from lt_offload.finetune.data.batches import Collate
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.sequences import Documents, Sequences, best_fit, pieces_of, sequences_of, wrapped


def examples(*lengths: int, prompt: int = 0) -> list[Example]:
    """Return examples of different tokens; the first ``prompt`` of each are not learned."""
    tokens = iter(range(1, sum(lengths) + 1))
    made = []
    for length in lengths:
        ids = [next(tokens) for _ in range(length)]
        made.append(Example(ids=ids, labels=[IGNORED] * min(prompt, length) + ids[prompt:]))
    return made


def rows_of(made: list[Example], length: int, *, pack: bool = True) -> Sequences:
    return sequences_of(Documents.from_examples(made), length, pack)


def predicted(rows: Sequences) -> list[int]:
    """Return the tokens that are predicted: those with a label and a token before."""
    return sorted(label for row in range(len(rows)) for label in rows[row][1][1:].tolist() if label != IGNORED)


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_takes_the_fullest_bin_with_room(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 21, 200).tolist()
    room: list[int] = []
    since: list[int] = []
    bins: list[list[int]] = []
    for turn, item in enumerate(sorted(range(200), key=lambda item: -lengths[item])):
        fitting = [number for number in range(len(bins)) if room[number] >= lengths[item]]
        if not fitting:
            fitting = [len(bins)]
            room, since, bins = [*room, 20], [*since, turn], [*bins, []]
        best = min(fitting, key=lambda number: (room[number], since[number]))
        room[best] -= lengths[item]
        since[best] = turn
        bins[best].append(item)
    assert best_fit(np.array(lengths), 20) == bins


@pytest.mark.parametrize("pack", [True, False])
def test_every_token_is_predicted_once(pack: bool) -> None:
    """But for the first of each text, which nothing comes before; also of texts of several rows."""
    made = examples(3, 9, 1, 4, 21, 5, 6, 2)
    rows = rows_of(made, 5, pack=pack)
    assert predicted(rows) == sorted(token for example in made for token in example.ids[1:])
    assert rows.lengths.max() <= 5
    if pack:
        assert len(rows) < len(rows_of(made, 5, pack=False))


def test_long_examples_of_responses_are_cut_and_counted() -> None:
    documents = Documents.from_examples([*examples(3, 9, 12, prompt=2), *examples(8, 4, prompt=6)])
    pieces, losses, left_out = pieces_of(documents, 5)
    assert pieces.tolist() == [[0, 0, 3], [1, 0, 5], [2, 0, 5]]
    assert left_out.tolist() == [3, 4]
    assert losses == [
        f"data.max_length=5 cuts 2 rows, and loses {4 + 7 + 2} tokens to learn",
        "1 rows have their whole answer behind data.max_length=5: raise it",
        "1 rows have no answer or text to learn",
    ]


def test_wrapped_rows_without_anything_to_learn_are_left_out() -> None:
    documents = Documents.from_examples(examples(4, 12, 3, prompt=9) + examples(3))
    rows = wrapped(documents, 5)
    assert [rows[row][0].tolist()[0] for row in range(len(rows))] == [11, 16, 2]
    assert len(wrapped(Documents.from_examples([]), 5)) == 0


@pytest.mark.parametrize("positions", [True, False])
def test_packed_batches_are_of_one_width(positions: bool) -> None:
    rows = rows_of(examples(3, 2, 4), 6)
    batch = Collate(99, 6, positions or "wrapped")([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[6, 7, 8, 9, 4, 5], [1, 2, 3, 99, 99, 99]]
    assert batch["labels"].tolist() == [[IGNORED, 7, 8, 9, IGNORED, 5], [IGNORED, 2, 3, *[IGNORED] * 3]]
    assert sorted(batch) == ["input_ids", "labels", *(["position_ids"] if positions else [])]
    if positions:
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize(("lengths", "width"), [((3, 9), 16), ((8, 2), 8), ((20, 1), 20)])
def test_padding(lengths: tuple[int, int], width: int) -> None:
    documents = Documents.from_examples(examples(*lengths))
    pieces = np.array([[number, 0, length] for number, length in enumerate(lengths)])
    rows = Sequences(documents, pieces, np.ones(len(lengths), int), apart=True)
    batch = Collate(0, 20, False)([rows[0], rows[1]])
    assert {t.shape for t in batch.values()} == {(2, width)}
    for row, length in enumerate(lengths):
        assert batch["input_ids"][row, :length].tolist() == rows[row][0].tolist()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (width - length)
        assert batch["labels"][row, length:].tolist() == [IGNORED] * (width - length)
        assert batch["input_ids"][row, length:].eq(0).all()
