"""What a block's run changes is found, and nothing else."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.model.state.effects import Effects


class Block(nn.Module):
    """With attributes of every kind; ``run`` changes some."""

    def __init__(self, run: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.empty_list: list[int] = []
        self.empty_dict: dict[str, int] = {}
        self.empty_set: set[int] = set()
        self.nested: dict[str, Any] = {"list": [1, {2, 3}], "tuple": (set(), []), "tensor": torch.ones(1)}
        self.count = 0
        self.run = run


def changed(run: Callable[[Any], object], runs: int = 5) -> list[int]:
    """Return, per run, how many parts have been changed."""
    block = Block(run)
    effects, counts = Effects(block), []
    for _ in range(runs):
        with effects.first_run() as snapshot:
            block.run(block)
        counts.append(len(snapshot.items))
    return counts


def test_what_nobody_changes_is_not_restored() -> None:
    assert changed(lambda block: None) == [0] * 5


@pytest.mark.parametrize(
    "run",
    [
        lambda block: setattr(block, "count", block.count + 1),
        lambda block: block.empty_list.append(1),
        lambda block: block.empty_dict.update({str(len(block.empty_dict)): 1}),
        lambda block: block.empty_set.add(len(block.empty_set)),
        lambda block: block.nested["list"][1].add(-len(block.nested["list"][1])),
        lambda block: block.nested["tuple"][0].add(len(block.nested["tuple"][0])),
        lambda block: block.mean.add_(1),
    ],
)
def test_what_a_run_changes_is_restored(run: Callable[[Any], object]) -> None:
    assert changed(run) == [1] * 5


def test_what_was_emptied_is_filled_again() -> None:
    block = Block(lambda block: None)
    with Effects(block).first_run() as snapshot:
        block.nested["list"].clear()
    snapshot.undo()
    assert block.nested["list"] == [1, {2, 3}]


class Asked(collections.OrderedDict[str, int]):
    """Counts what is asked of it."""

    asked = 0

    def __getattribute__(self, name: str) -> Any:
        Asked.asked += 1
        return super().__getattribute__(name)

    def __iter__(self) -> Any:
        Asked.asked += 1
        return super().__iter__()

    def __setitem__(self, name: str, value: int) -> None:
        Asked.asked += 1


def test_what_a_container_of_the_users_own_holds_is_restored_without_asking_it() -> None:
    block = Block(lambda block: collections.OrderedDict.__setitem__(block.held, "b", 2))
    block.held = Asked()
    Asked.asked = 0
    with Effects(block).first_run() as snapshot:
        block.run(block)
    snapshot.undo()
    assert list(collections.OrderedDict.items(block.held)) == []
    assert Asked.asked == 0
