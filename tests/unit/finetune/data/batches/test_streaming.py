from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches import Batches, Collate, Place, ResumableLoader
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.sequences import Documents, Sequences, sequences_of
from tests.unit.finetune.data.batches.orders import order

LENGTH = 12


class Source:
    """Texts of different lengths and tokens; every third row is none."""

    def __init__(self, rows: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.rows = [random.integers(1, 999, random.integers(2, 2 * LENGTH)).tolist() for _ in range(rows)]
        self.read_rows = 0

    def read(self, start: int = 0) -> Iterator[tuple[int, Example]]:
        for number in range(start, len(self.rows)):
            self.read_rows += 1
            if number % 3 != 2:
                yield number + 1, Example(ids=self.rows[number], labels=self.rows[number])


def loader(*sources: Source, workers: int = 0, length: int = 40, buffer: int = 7, **settings: Any) -> ResumableLoader:
    def read(place: Place) -> Iterator[tuple[Place, Example]]:
        first, start = place
        for number, source in enumerate(sources[first:], start=first):
            for rows, example in source.read(start if number == first else 0):
                yield (number, rows), example

    def stretches(place: Place) -> Iterator[tuple[Place, Sequences]]:
        examples = read(place)
        while some := list(islice(examples, buffer)):
            yield some[-1][0], sequences_of(Documents.from_examples(each for _, each in some), LENGTH, True)

    defaults: dict[str, Any] = {"batch_size": 3, "seed": 5, "data": "data.path=x"}
    batches = Batches(stretches=stretches, collate=Collate(0, LENGTH, True), **defaults | settings)
    return ResumableLoader(batches, length=length, num_workers=workers)


def sources() -> tuple[Source, Source]:
    return Source(30, 0), Source(20, 1)


def seen(batches: Any) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() + batch["labels"].tolist() for batch in batches]


def learned(batches: list[dict[str, Tensor]]) -> list[int]:
    return sorted(label for batch in batches for label in batch["labels"].flatten().tolist() if label != IGNORED)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_with_the_batches_that_would_have_come(workers: int) -> None:
    """Through windows, sources and passes over the data; whether or not a process reads ahead."""
    expected = seen(loader(*sources()))
    assert len(expected) == 40
    states: list[Any] = []
    whole = loader(*sources(), workers=workers)
    states.append(whole.state_dict())
    for number, batch in enumerate(whole):
        assert seen([batch]) == [expected[number]]
        states.append(whole.state_dict())
    assert states[-1]["epoch"] >= 1, "the data have begun again"
    stops = range(41) if workers == 0 else (0, 13)
    for stop in stops:
        resumed = loader(*sources(), workers=workers, length=40 - stop)
        resumed.load_state_dict(states[stop])
        assert seen(islice(resumed, 8)) == expected[stop : stop + 8]
        assert resumed.state_dict() == states[min(stop + 8, 40)], "and so on"


def test_what_was_read_is_not_read_again() -> None:
    first, second = sources()
    whole = loader(first, second)
    taken = seen(islice(whole, 12))
    state = whole.state_dict()
    assert state["place"][0] == 1
    again = sources()
    resumed = loader(*again)
    resumed.load_state_dict(state)
    assert seen(islice(resumed, 1)) == [seen(loader(*sources()))[len(taken)]]
    assert again[0].read_rows == 0
    assert again[1].read_rows < 20


def test_another_epoch_of_lightning_goes_on() -> None:
    expected = seen(loader(*sources()))
    pieces = loader(*sources(), length=15)
    assert seen(pieces) + seen(pieces) == expected[:30]


def test_a_pass_learns_everything_once_in_another_order_each_time() -> None:
    source = Source(40, 2)
    passes = loader(source, batch_size=1, length=200)
    epochs: dict[int, list[Any]] = defaultdict(list)
    for batch in passes:
        epochs[passes.state_dict()["epoch"]].append(batch)
    rows = [row for number, row in enumerate(source.rows) if number % 3 != 2]
    everything = sorted(token for row in rows for token in row[1:])
    assert learned(epochs[0]) == learned(epochs[1]) == everything
    assert seen(epochs[0]) != seen(epochs[1])
    assert seen(loader(source, seed=6)) != seen(loader(source))


def test_what_is_held_out_is_not_trained() -> None:
    source = Source(9, 3)
    held_out, trained = source.rows[0], [row for number, row in enumerate(source.rows) if number % 3 != 2][1:]
    batches = list(loader(source, first=(0, 1), length=30))
    assert set(learned(batches)) == {token for row in trained for token in row[1:]}
    assert not set(held_out[1:]) <= set(learned(batches))


def test_data_without_anything_to_learn() -> None:
    with pytest.raises(ConfigError, match=r"data\.path=x has no trainable tokens"):
        list(loader(Source(0, 0)))


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 2}, {"first": [0, 2]}, {"pack": True}])
def test_another_order_is_not_continued(change: dict[str, Any]) -> None:
    now = loader(*sources(), settings={"pack": False})
    state = now.state_dict()
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was {re.escape(str(next(iter(change.values()))))}, "):
        now.load_state_dict(state | {"depends_on": state["depends_on"] | change})


def test_orders_of_streams_and_of_rows_are_not_mixed_up() -> None:
    with pytest.raises(ConfigError, match=r"of a run with data\.streaming=false"):
        loader(*sources()).load_state_dict(order().state_dict())
    with pytest.raises(ConfigError, match=r"of a run with data\.streaming=true"):
        order().load_state_dict(loader(*sources()).state_dict())
