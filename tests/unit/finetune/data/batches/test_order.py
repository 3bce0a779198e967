from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches import Batches, ResumableLoader, held_out, shuffled
from tests.unit.finetune.data.batches.orders import LENGTHS, order, taken


def of_epoch(epoch: int, **options: Any) -> Batches:
    batches = order(**options)
    batches.set_epoch(epoch)
    return batches


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert taken(of_epoch(0, seed=0)) == taken(of_epoch(0, seed=0))
    orders = [taken(of_epoch(epoch, seed=seed)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(row for batch in orders[0] for row in batch) == list(range(11)), "every row, once"
    assert [len(batch) for batch in orders[0]] == [2, 2, 2, 2, 2, 1]
    assert len(order()) == 6


@pytest.mark.parametrize(
    ("stop", "before", "after", "grouped"),
    [(0, 0, 0, False), (1, 0, 0, True), (4, 0, 0, False), (5, 0, 0, True), (0, 1, 2, False), (1, 2, 0, False)],
)
def test_order_continues_in_the_middle(stop: int, before: int, after: int, grouped: bool) -> None:
    """Whatever workers have fetched ahead, and with other workers."""
    expected = taken(of_epoch(2, grouped=grouped))
    whole = ResumableLoader(of_epoch(2, grouped=grouped), num_workers=before)
    iterator = iter(whole)
    begun = [next(iterator) for _ in range(stop)]
    resumed = ResumableLoader(of_epoch(0, grouped=grouped), num_workers=after)
    resumed.load_state_dict(whole.state_dict())
    rest = iter(resumed)
    resumed.batch_sampler.set_epoch(7)  # after Lightning has asked for the iterator, and as it happens to count
    assert begun + list(rest) == expected
    assert list(resumed) == taken(of_epoch(3, grouped=grouped)), "the next epoch is whole again"


@pytest.mark.parametrize("change", [{"count": 12}, {"batch_size": 3}, {"seed": 4}, {"grouped": True}, {"tokens": 9}])
def test_another_order_is_not_continued(change: dict[str, int]) -> None:
    now = order(settings={"tokens": 8})
    state = now.state_dict()
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was {next(iter(change.values()))}, now it is"):
        now.load_state_dict(state | {"depends_on": state["depends_on"] | change})


@pytest.mark.parametrize("epoch", [0, 1])
def test_batches_of_like_lengths(epoch: int) -> None:
    def made(group: int | None) -> np.ndarray:
        numbers = shuffled(LENGTHS, group, (-1, epoch, 0))
        assert sorted(numbers) == list(range(2003))
        return LENGTHS[numbers[:2000].reshape(-1, 8)]

    def padding(lengths: np.ndarray) -> float:
        return float(1 - lengths.sum() / (lengths.max(axis=1).sum() * 8))

    assert padding(made(8)) < 0.03 < 0.4 < padding(made(None))
    assert np.corrcoef(made(8).max(axis=1), np.arange(250))[0, 1] < 0.2, "short and long batches take turns"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"share": 0.25}, [6, 7]),
        ({"share": 0.001}, [7]),
        ({"share": 0.0}, []),
        ({"share": 0.9, "rows": 3}, [5, 6, 7]),
        ({"share": 0.9, "rows": 0}, []),
    ],
)
def test_the_last_rows_are_held_out(settings: dict[str, float], expected: list[int]) -> None:
    training, validation = held_out(8, **settings)  # type: ignore[arg-type]
    assert validation.tolist() == expected
    assert training.tolist() == list(range(8 - len(expected)))


def test_rows_are_held_out_at_random() -> None:
    training, validation = held_out(100, share=0.1, seed=1)
    assert sorted([*training, *validation]) == list(range(100))
    assert validation.tolist() == sorted(validation) != list(range(90, 100))
    assert validation.tolist() == held_out(100, share=0.1, seed=1)[1].tolist()
    assert validation.tolist() != held_out(100, share=0.1, seed=2)[1].tolist()
