"""What each of several processes takes of an order; runs of such processes are in tests/parity/finetune."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches import Batches
from lt_offload.finetune.processes import Share, share_of
from tests.unit.finetune.conftest import data
from tests.unit.finetune.data.batches.orders import order, rows, taken


def orders(count: int, of: int, **options: Any) -> list[Batches]:
    made = rows(count)
    return [order(count, made=made, share=Share(of, first), **options) for first in range(of)]


@pytest.mark.parametrize(
    ("count", "of", "silent", "last"),
    [
        (23, 2, False, [2, 1]),
        (24, 3, False, [2, 2, 2]),
        (22, 3, False, [2, 1, 1]),
        (20, 3, False, [2, 2, 2]),
        (22, 3, True, [2, 2, 0]),
        (19, 3, True, [1, 0, 0]),
    ],
)
def test_processes_take_turns(count: int, of: int, silent: bool, last: list[int]) -> None:
    shares = [taken(each) for each in orders(count, of, silent=silent)]
    assert [sum(row >= 0 for row in share[-1]) for share in shares] == last
    assert all(share[-1] for share in shares)
    whole = taken(order(count))
    turns = [batch for group in zip(*shares, strict=True) for batch in group]
    trained = [row for batch in turns for row in batch if row >= 0]
    assert trained == [row for batch in whole for row in batch][: len(trained)]
    assert count - len(trained) == (2 if count == 20 else 0), "less than a row for each"
    assert {len(each) for each in orders(count, of, silent=silent)} == {len(shares[0])}
    if silent:
        assert turns[: len(whole)] == whole
    before, after = (orders(count, of, silent=silent)[1] for _ in range(2))
    taken(before, 2)
    after.load_state_dict(before.state_dict())
    assert taken(after) == shares[1][2:]


def trained(processes: list[Batches], rounds: int | None = None) -> list[int]:
    """Return the rows that processes train on, the first ``rounds`` batches of each."""
    shares = [taken(each, rounds) for each in processes]
    return [row for turn in zip(*shares, strict=True) for batch in turn for row in batch if row >= 0]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("parts", [[(2, 3), (1, None)], [(1, 5), (3, None)], [(2, 3), (4, 1), (3, 2), (2, None)]])
def test_others_take_what_is_left_of_an_epoch(parts: list[tuple[int, int | None]], grouped: bool, silent: bool) -> None:
    """Whatever the numbers of processes: no row comes twice, and none is left out but what does not go up."""
    options: dict[str, Any] = {"grouped": grouped, "silent": silent}
    state: Any = None
    all_taken: list[int] = []
    for of, rounds in parts:
        processes = orders(100, of, **options)
        if state is not None:
            left = rf"{100 - len(all_taken)} of 100 sequences that were not trained"
            for each in processes:
                for _ in range(2):  # as Lightning does
                    with pytest.warns(UserWarning, match=left):
                        each.load_state_dict(state)
            # Lightning counts the batches of an epoch to its end.
            assert {each.moved for each in processes} == {processes[0].state_dict()["batches"] - state["batches"]}
        all_taken += trained(processes, rounds)
        assert len({each.state_dict()["batches"] for each in processes}) == 1
        assert rounds is not None or processes[0].state_dict()["batches"] == len(processes[0])
        state = processes[0].state_dict()
    assert len(set(all_taken)) == len(all_taken)
    assert len(all_taken) == 100 if silent else len(all_taken) > 100 - parts[-1][0]
    whole = [row for batch in taken(order(100, grouped=grouped)) for row in batch]
    assert all_taken[: len(all_taken) // 2] == whole[: len(all_taken) // 2]
    # The next epoch is an ordinary one.
    processes, fresh = (orders(100, parts[-1][0], **options) for _ in range(2))
    for old, new in zip(processes, fresh, strict=True):
        old.load_state_dict(state)
        new.set_epoch(1)
    assert trained(processes) == trained(fresh)
    assert [each.state_dict()["batches"] for each in processes] == [len(each) for each in processes]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3), (4, 3)])
def test_an_epoch_that_has_ended_is_not_gone_on_with(before: int, now: int) -> None:
    """Also if rows were left that did not go up in as many processes."""
    processes = orders(25, before)
    trained(processes)
    resumed = order(25, share=Share(now))
    with pytest.warns(UserWarning, match="the 0 of 25"):
        resumed.load_state_dict(processes[0].state_dict())
    assert resumed.state_dict()["batches"] == len(resumed)
    fresh = order(25, share=Share(now))
    fresh.set_epoch(1)
    assert taken(resumed) == taken(fresh)


def trainer(**strategy: Any) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(**strategy), world_size=4, global_rank=3, overfit_batches=0)


def test_processes_with_parts_of_one_model_take_the_same() -> None:
    assert share_of(trainer(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})) == Share(2, 1)
    assert share_of(trainer()) == Share(4, 3)
    assert share_of(None) == Share(1, 0)


def test_each_process_needs_a_batch(folder: str, text: str) -> None:
    source = data(folder, text, batch_size=20)
    source.setup("fit")
    source.trainer = trainer()
    with pytest.raises(ConfigError, match=r"lower data\.batch_size .*, or have fewer than 4 processes, each of"):
        source.train_dataloader()


def test_epochs_have_orders_of_their_own_unless_a_few_batches_are_overfitted() -> None:
    for reshuffled in (True, False):
        batches = order(24, reshuffled=reshuffled)
        first = taken(batches)
        batches.sampler.set_epoch(1)
        assert (taken(batches) != first) == reshuffled
