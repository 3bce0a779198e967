"""What a loop of one's own reads, saves, schedules and writes between steps is what plain PyTorch would show it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import sampling
from tests.support.engines import differences
from tests.support.user_nets import (
    RUNS,
    Loop,
    Net,
    by_budget,
    in_every_run,
    ordinary,
    ours,
    plain,
    with_every_budget,
)


@with_every_budget
def test_an_ordinary_loop(budget: str) -> None:
    assert differences(plain(Net), by_budget(Net, budget)) == []


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Forwards with a graph that nobody uses, reading and saving in between."""
    found = []
    for batch in batches:
        found.append(model(**batch)["loss"].detach().clone())
        found += [value.clone() for value in model.state_dict().values()]
        found += ordinary(model, optimizer, [batch])
        found += [state["exp_avg"].clone() for state in optimizer.state.values()]
        found += [copy.deepcopy(model)(**batch)["loss"].detach()]
        found += [p.clone() for p in pickle.loads(pickle.dumps(model.layers)).parameters()]
    return found


@in_every_run
def test_reading_saving_and_copying_between_steps(options: tuple[str, ...]) -> None:
    assert differences(plain(Net, evaluating), ours(Net, options, evaluating)) == []


def holding(hold: Callable[[nn.Module], list[Any]]) -> tuple[Callable[[], Net], Loop]:
    """A net whose memory somebody else holds before training, and a loop that reads and writes through that."""

    def make() -> Net:
        net = Net()
        net.__dict__["kept"] = hold(net)
        return net

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        found = []
        for batch in batches:
            found += ordinary(model, optimizer, [batch])
            found += [torch.tensor(np.asarray(kept)) for kept in model.kept]
            for kept in model.kept[::3]:
                kept *= 0.9
        return found

    return make, loop


HOLDERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "state dict": lambda net: list(net.state_dict().values()),
    "arrays": lambda net: [p.detach().numpy() for p in net.parameters()],
    "a view": lambda net: [net.layers[1].linear.weight.detach()[3]],  # type: ignore[union-attr, index]
    "dlpack": lambda net: [torch.from_dlpack(p.detach()) for p in net.parameters()],
    "shared memory": lambda net: [p.detach() for p in net.share_memory().parameters()],
}


@pytest.mark.parametrize(("name", "options"), sampling.grid(HOLDERS, RUNS.values(), count=7))
def test_memory_that_somebody_holds_before_training(name: str, options: tuple[str, ...]) -> None:
    make, loop = holding(HOLDERS[name])
    expected, found = plain(make, loop), ours(make, options, loop)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.kept, found.model.kept, strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))
