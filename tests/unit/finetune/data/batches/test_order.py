from __future__ import annotations

import numpy as np
import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.documents import Documents
from lt_offload.finetune.data.batches.loaders import ResumableLoader, held_out
from lt_offload.finetune.data.batches.order import ResumableBatches
from lt_offload.finetune.data.batches.packing import one_by_one, pieces_of
from lt_offload.finetune.data.formats import Example

LENGTHS = np.random.default_rng(0).integers(1, 400, 2003)


def order(seed: int = 3, epoch: int = 2, **options: object) -> ResumableBatches:
    batches = ResumableBatches(11, 2, seed=seed, **options)  # type: ignore[arg-type]
    batches.set_epoch(epoch)
    return batches


def loader(batches: ResumableBatches, workers: int = 0) -> ResumableLoader:
    documents = Documents.from_examples(Example(ids=[n, n, n], labels=[n, n, n]) for n in range(11))
    rows = one_by_one(documents, pieces_of(documents, np.arange(11), 4)[0])
    return ResumableLoader(rows, batch_sampler=batches, collate_fn=_numbers, num_workers=workers)


def _numbers(rows: list[tuple[object, ...]]) -> list[int]:
    return [int(row[0][0]) for row in rows]  # type: ignore[index]


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert list(order(0, 0)) == list(order(0, 0))
    assert list(order(0, 1)) == list(order(1, 0)) != list(order(0, 0))
    assert sorted(index for batch in order(0, 0) for index in batch) == list(range(11)), "every row, once"
    assert [len(batch) for batch in order()] == [2, 2, 2, 2, 2, 1]
    assert len(order()) == 6


@pytest.mark.parametrize(
    ("taken", "before", "after", "grouped"),
    [(0, 0, 0, False), (1, 0, 0, True), (4, 0, 0, False), (5, 0, 0, True), (0, 1, 2, False), (1, 2, 0, False)],
)
def test_order_continues_in_the_middle(taken: int, before: int, after: int, grouped: bool) -> None:
    """Whatever workers have fetched ahead, and with other workers."""
    options = {"lengths": LENGTHS[:11]} if grouped else {}
    expected = list(order(**options))
    whole = loader(order(**options), before)
    iterator = iter(whole)
    begun = [next(iterator) for _ in range(taken)]
    state = whole.state_dict()
    assert state["position"] == taken
    resumed = loader(order(epoch=0, **options), after)
    resumed.load_state_dict(state)
    rest = iter(resumed)
    resumed.batch_sampler.set_epoch(7)  # after Lightning has asked for the iterator, and as it happens to count
    assert begun + list(rest) == expected
    assert list(resumed) == list(order(epoch=3, **options)), "the next epoch is whole again"


def test_order_at_the_end_of_an_epoch_starts_the_next_one_whole() -> None:
    whole = loader(order(epoch=0))
    list(whole)
    resumed = order(epoch=1)
    resumed.load_state_dict(whole.state_dict())
    assert list(resumed) == list(order(epoch=1))


@pytest.mark.parametrize("change", [{"count": 12}, {"batch_size": 3}, {"seed": 4}, {"grouped": True}, {"tokens": 9}])
def test_another_order_is_not_continued(change: dict[str, int]) -> None:
    state = order().state_dict() | change
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was {next(iter(change.values()))}, now it is"):
        order().load_state_dict(state)


@pytest.mark.parametrize("epoch", [0, 1])
def test_batches_of_like_lengths(epoch: int) -> None:
    def padding(batches: ResumableBatches) -> float:
        batches.set_epoch(epoch)
        *full, left = batches
        made = np.array(full)
        assert made.shape == (250, 8)
        assert sorted([*made.flat, *left]) == list(range(2003))
        return 1 - LENGTHS[made].sum() / (LENGTHS[made].max(axis=1).sum() * 8)

    grouped = ResumableBatches(2003, 8, seed=1, lengths=LENGTHS)
    assert padding(grouped) < 0.03 < 0.4 < padding(ResumableBatches(2003, 8, seed=1))
    longest = LENGTHS[np.array(list(grouped)[:-1])].max(axis=1)
    assert np.corrcoef(longest, np.arange(250))[0, 1] < 0.2, "short and long batches take turns"


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


def test_all_can_be_held_out_but_not_more() -> None:
    assert [len(part) for part in held_out(2, share=0.99)] == [0, 2]
    with pytest.raises(ConfigError, match=r"data\.validation_rows=5 is more than the 2 rows there are"):
        held_out(2, share=0.1, rows=5)
