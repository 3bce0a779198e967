"""Clipping by norm and by value through the engine: the numbers of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.plan import solve
from tests.support import models
from tests.support.engines import Result, differences, installed, make_optimizer
from tests.support.windows import Training, budgets, require_equal

UNEQUAL = [[(2, 12)], [(2, 12), (1, 9)], [(2, 12), (2, 7), (1, 12)], [(1, 5)]]


def test_clipping_by_norm_equals_plain_training() -> None:
    for options in ({"dropout": 0.1}, {"family": "llama-tied", "dtype": torch.bfloat16}):
        training = Training(start=models.build(**options), windows=UNEQUAL, clip_norm=0.2)
        profile, expected = training.profile(), training.plainly()
        for memory in budgets(profile, delayed=True):
            require_equal(training, solve(profile, memory=memory, delayed=True), expected)
