"""Clipping by norm and by value through the engine: the numbers of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_offload.plan import solve
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import models

UNEQUAL = [[(2, 12)], [(2, 12), (1, 9)], [(2, 12), (2, 7), (1, 12)], [(1, 5)]]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"dropout": 0.1}, {}),
        ({"family": "llama-tied", "dtype": torch.bfloat16}, {}),
        ({"lora": True}, {"accumulate": 2}),
        ({"family": "bloom"}, {"host_update": False}),
        ({"family": "llama"}, {"planner": "l2l"}),
        ({"family": "llama"}, {"planner": "memferry"}),
    ],
    ids=str,
)
def test_clipping_by_norm_equals_plain_training(options: dict[str, Any], settings: dict[str, Any]) -> None:
    training = Training(start=models.build(**options), windows=UNEQUAL, clip_norm=0.2)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, delayed=True, **settings):
        require_equal(training, solve(profile, memory=memory, delayed=True, **settings), expected)


@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"delayed": True}], ids=str)
@pytest.mark.parametrize("options", [{"family": "llama-tied"}, {"dtype": torch.bfloat16, "lora": True}], ids=str)
def test_clipping_by_value_equals_plain_training(options: dict[str, Any], settings: dict[str, Any]) -> None:
    training = Training(start=models.build(**options), windows=UNEQUAL, clip_value=1e-3)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, **settings):
        require_equal(training, solve(profile, memory=memory, **settings), expected)
