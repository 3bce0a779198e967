"""What each of several processes takes of an order; runs of such processes are in tests/parity/finetune."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    ("before", "now", "said"), [(2, 1, "2 processes, now there is 1"), (1, 3, "1 process, now there are 3")]
)
def test_another_number_of_processes_does_not_go_on(before: int, now: int, said: str) -> None:
    state = ResumableBatches(24, 2, seed=3, share=Share(before)).state_dict()
    with pytest.raises(ConfigError, match=f"the checkpoint is of a run with {said}: .* that make {before}, or"):
        ResumableBatches(24, 2, seed=3, share=Share(now)).load_state_dict(state)


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
