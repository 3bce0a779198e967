"""Several micro-batches per update through the engine: the numbers of plain PyTorch, which adds to ``p.grad``."""

from __future__ import annotations

import pytest
import torch

from lt_offload.plan import solve
from tests import sampling
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import models

UNEQUAL = [[(2, 12)], [(2, 12), (1, 9)], [(2, 12), (2, 7), (1, 12)], [(2, 12), (2, 12)], [(1, 5)]]
"""Windows of one to three micro-batches with unequal token counts, and a last short group."""


def make(**options: object) -> Training:
    settings = {name: options.pop(name) for name in ("optimizer",) if name in options}
    start = models.build(**{"family": "llama", **options})  # type: ignore[arg-type]
    return Training(start=start, windows=UNEQUAL, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", ["auto", *sampling.some(["offmate", "l2l", "memferry", "greedy"], 2)])
def test_windows_equal_plain_training(planner: str) -> None:
    training = make()
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, accumulate=3, planner=planner):
        require_equal(training, solve(profile, memory=memory, planner=planner, accumulate=3), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings"),
    sampling.some(
        [
            ({"family": "llama-tied", "dropout": 0.1}, {}),
            ({"family": "bloom", "dropout": 0.1}, {"host_update": False}),
            ({"lora": True}, {}),
            ({"dtype": torch.bfloat16}, {}),
            ({"optimizer": "sgd-plain"}, {"host_update": False}),
            ({"optimizer": "adafactor"}, {"recompute": False}),
        ],
        3,
    ),
    ids=str,
)
def test_models_and_optimizers(options: dict[str, object], settings: dict[str, object]) -> None:
    training = make(**options)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, accumulate=2, **settings):
        require_equal(training, solve(profile, memory=memory, accumulate=2, **settings), expected)  # type: ignore[arg-type]


@pytest.mark.slow
def test_equal_batches_stay_in_the_ram_that_was_planned() -> None:
    training = Training(start=models.build("llama"), windows=[[(2, 12)] * 3] * 3)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, accumulate=3):
        require_equal(training, solve(profile, memory=memory, accumulate=3), expected)
