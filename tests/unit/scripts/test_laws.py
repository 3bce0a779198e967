"""The laws of planning: how violations are counted, and one law on one case."""

from __future__ import annotations

import math

import pytest

from scripts.bench import laws


def test_a_plan_with_more_is_compared_with_the_best_before_it() -> None:
    assert laws.slower([2.0, 1.0, 1.5]) == [0.0, 0.5]
    assert laws.slower([math.inf, 1.0, 1.0]) == [0.0, 0.0]


@pytest.mark.slow
def test_more_device_memory_is_not_slower() -> None:
    example = laws.case(3)
    plans = [laws._solved(example.profile, memory) for memory in (*example.budgets[::2], laws.AMPLE)]
    times = [plan.predicted.iteration_s for plan in plans]
    assert max(laws.slower(times)) <= laws.TOLERANCE, times
