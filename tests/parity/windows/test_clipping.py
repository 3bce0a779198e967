"""Clipping by norm and by value through the engine: the numbers of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

from lt_offload.optim import AdamW
from lt_offload.plan import solve
from tests import sampling
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import models

UNEQUAL = [[(2, 12)], [(2, 12), (1, 9)], [(2, 12), (2, 7), (1, 12)], [(1, 5)]]


@pytest.mark.parametrize(
    ("options", "settings"),
    sampling.some(
        [
            ({"dropout": 0.1}, {}),
            ({"family": "llama-tied", "dtype": torch.bfloat16}, {}),
            ({"lora": True}, {"accumulate": 2}),
            ({"family": "bloom"}, {"host_update": False}),
            ({"family": "llama"}, {"planner": "l2l"}),
            ({"family": "llama"}, {"planner": "memferry"}),
        ],
        4,
    ),
    ids=str,
)
def test_clipping_by_norm_equals_plain_training(options: dict[str, Any], settings: dict[str, Any]) -> None:
    training = Training(start=models.build(**options), windows=UNEQUAL, clip_norm=0.2)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, delayed=True, **settings):
        require_equal(training, solve(profile, memory=memory, delayed=True, **settings), expected)


@pytest.mark.parametrize(
    ("options", "optimizer", "settings"),
    sampling.some(
        [
            ({"family": "llama"}, {}, {}),
            ({"family": "llama-tied"}, {}, {"planner": "l2l"}),
            ({"family": "llama", "dtype": torch.bfloat16}, {}, {"planner": "stream"}),
            ({"lora": True}, {}, {"planner": "l2l"}),
            ({"family": "llama"}, {"state_dtype": "8bit", "min_8bit_size": 300}, {"accumulate": 2}),
        ],
        3,
    ),
    ids=str,
)
def test_norms_that_are_clipped_in_some_windows_only(
    options: dict[str, Any], optimizer: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Where nothing is clipped, nobody multiplies; the sums are gradients in windows of one."""
    update = partial(AdamW, lr=1e-3, **optimizer)
    training = Training(start=models.build(**options), windows=UNEQUAL, optimizer=update, clip_norm=1e9)
    losses, ends = training.plainly().losses, accumulate(1 + len(window) for window in UNEQUAL)
    norms = sorted(losses[end - 1].item() for end in ends)
    training = replace(training, clip_norm=(norms[1] + norms[2]) / 2)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, delayed=True, **settings):
        require_equal(training, solve(profile, memory=memory, delayed=True, **settings), expected)


@pytest.mark.parametrize(
    ("options", "settings"),
    sampling.grid(
        [{"family": "llama-tied"}, {"dtype": torch.bfloat16, "lora": True}], [{"accumulate": 3}, {"delayed": True}]
    ),
    ids=str,
)
def test_clipping_by_value_equals_plain_training(options: dict[str, Any], settings: dict[str, Any]) -> None:
    training = Training(start=models.build(**options), windows=UNEQUAL, clip_value=1e-3)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, **settings):
        require_equal(training, solve(profile, memory=memory, **settings), expected)


def test_updates_that_settle_come_after_the_sums_that_they_use() -> None:
    """No gradient that arrives tells them so."""
    training = Training(start=models.build("llama"), windows=[[(2, 12)]], clip_value=1e-3)
    plan = solve(training.profile(), memory="1GB", delayed=True, planner="stream")
    assert {op.lane for op in plan.ops if op.kind == "update"} == {"host"}
    require_equal(training, plan, training.plainly())
