"""Nets whose seams are drawn train in exactly the smallest memory that is named, and equal plain PyTorch."""

from __future__ import annotations

import pytest

import lt_offload
from tests import sampling
from tests.parity.models.seams import trial
from tests.support.profiles import budgets

ROWS = 60
NAMED = [0, 2, 6, 9, 11, 14, 19, 26]
"""These were named less than they take: a leaf that requires gradients, casts, what a seam saves, parameters in it."""


@pytest.mark.own_plan("is about the smallest memory with and without recomputation")
@pytest.mark.parametrize("budget", ["tight", "recomputing"])
@pytest.mark.parametrize("number", sampling.some(NAMED, 3) + sampling.some(range(27, ROWS), 2))
def test_the_smallest_memory_is_enough(number: int, budget: str) -> None:
    net = trial(number)
    memory = budgets.smallest(net.profile, budget)
    plan = lt_offload.solve(net.profile, memory=memory, **budgets.planning(budget))
    assert net.differences(plan=plan) == []
