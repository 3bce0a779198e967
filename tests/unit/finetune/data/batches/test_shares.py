"""What each of several processes takes of an order; runs of such processes are in tests/parity/finetune."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.order import ResumableBatches
from lt_offload.finetune.processes import Share, share_of
from tests.unit.finetune.conftest import data


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
    orders = [ResumableBatches(count, 2, seed=3, share=Share(of, first), silent=silent) for first in range(of)]
    shares = [list(order) for order in orders]
    assert [sum(row >= 0 for row in share[-1]) for share in shares] == last
    assert all(share[-1] for share in shares)
    whole = list(ResumableBatches(count, 2, seed=3))
    turns = [batch for group in zip(*shares, strict=True) for batch in group]
    taken = [row for batch in turns for row in batch if row >= 0]
    assert taken == [row for batch in whole for row in batch][: len(taken)]
    assert count - len(taken) == (2 if count == 20 else 0), "less than a row for each"
    assert {len(order) for order in orders} == {len(shares[0])}
    if silent:
        assert turns[: len(whole)] == whole
    orders[1].position = 2
    orders[1].load_state_dict(orders[1].state_dict())
    assert list(orders[1]) == shares[1][2:]


def given(orders: list[ResumableBatches], rounds: int | None = None) -> list[int]:
    """Return the rows that processes train on, the first ``rounds`` batches of each; their loader counts them."""
    shares = [list(order)[:rounds] for order in orders]
    for order, share in zip(orders, shares, strict=True):
        order.position += len(share)
    return [row for turn in zip(*shares, strict=True) for batch in turn for row in batch if row >= 0]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("parts", [[(2, 3), (1, None)], [(1, 5), (3, None)], [(2, 3), (4, 1), (3, 2), (2, None)]])
def test_others_take_what_is_left_of_an_epoch(parts: list[tuple[int, int | None]], grouped: bool, silent: bool) -> None:
    """Whatever the numbers of processes: no row comes twice, and none is left out but what does not go up."""
    lengths = np.arange(100) % 7 if grouped else None
    state: Any = None
    taken: list[int] = []
    for of, rounds in parts:
        options: dict[str, Any] = {"seed": 3, "lengths": lengths, "silent": silent}
        orders = [ResumableBatches(100, 2, share=Share(of, first), **options) for first in range(of)]
        if state is not None:
            for order in orders:
                for _ in range(2):  # as Lightning does
                    with pytest.warns(UserWarning, match=rf"{100 - len(taken)} of 100 sequences that were not trained"):
                        order.load_state_dict(state)
        # Lightning counts the batches of an epoch to its end.
        counted = orders[0].position
        assert counted == 0 or orders[0].moved == counted - state["position"]
        new = given(orders, rounds)
        assert len({order.position for order in orders}) == 1
        assert rounds is not None or orders[0].position == len(orders[0])
        taken += new
        state = orders[0].state_dict()
    assert len(set(taken)) == len(taken)
    assert len(taken) == 100 if silent else len(taken) > 100 - parts[-1][0]
    if not grouped:
        assert (
            taken[: len(taken) // 2]
            == [row for batch in ResumableBatches(100, 2, seed=3) for row in batch][: len(taken) // 2]
        )
    # The next epoch is an ordinary one.
    of = parts[-1][0]
    orders = [ResumableBatches(100, 2, share=Share(of, first), **options) for first in range(of)]
    for order in orders:
        order.load_state_dict(state)
    fresh = [ResumableBatches(100, 2, share=Share(of, first), **options) for first in range(of)]
    for order in fresh:
        order.set_epoch(1)
    assert given(orders) == given(fresh)
    assert [order.position for order in orders] == [len(order) for order in orders]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3), (4, 3)])
def test_an_epoch_that_has_ended_is_not_gone_on_with(before: int, now: int) -> None:
    """Also if rows were left that did not go up in as many processes."""
    orders = [ResumableBatches(25, 2, seed=3, share=Share(before, first)) for first in range(before)]
    given(orders)
    order = ResumableBatches(25, 2, seed=3, share=Share(now))
    with pytest.warns(UserWarning, match="the 0 of 25"):
        order.load_state_dict(orders[0].state_dict())
    assert order.position == len(order)
    fresh = ResumableBatches(25, 2, seed=3, share=Share(now))
    fresh.set_epoch(1)
    assert list(order) == list(fresh)


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
        order = ResumableBatches(24, 2, seed=3, reshuffled=reshuffled)
        first = list(order)
        order.sampler.set_epoch(1)
        assert (list(order) != first) == reshuffled
