"""Clipping by norm and by value through the engine: the numbers of plain PyTorch."""

from __future__ import annotations

import torch

from lt_offload.plan import solve
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import models

UNEQUAL = [[(2, 12)], [(2, 12), (1, 9)], [(2, 12), (2, 7), (1, 12)], [(1, 5)]]


def test_clipping_by_norm_equals_plain_training() -> None:
    for options in ({"dropout": 0.1}, {"family": "llama-tied", "dtype": torch.bfloat16}):
        training = Training(start=models.build(**options), windows=UNEQUAL, clip_norm=0.2)
        profile, expected = training.profile(), training.plainly()
        for memory in budgets(profile, delayed=True):
            require_equal(training, solve(profile, memory=memory, delayed=True), expected)
