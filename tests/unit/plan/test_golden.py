"""Plans stay as they are unless they are meant to change; see ``golden_plans.py``."""

from __future__ import annotations

import json

import pytest

from tests import sampling
from tests.support.profiles.golden_plans import FILE, PLANNERS, SEEDS, row

ROWS = json.loads(FILE.read_text())
CASES = [(seed, planner) for seed in SEEDS for planner in PLANNERS]


def test_every_case_is_written() -> None:
    assert list(ROWS) == [f"{seed} {planner}" for seed, planner in CASES]
    assert sum("digest" in row for row in ROWS.values()) >= 25


@pytest.mark.parametrize(("seed", "planner"), CASES if sampling.FULL else CASES[::5])
def test_plan_is_as_it_was(seed: int, planner: str) -> None:
    assert row(seed, planner) == ROWS[f"{seed} {planner}"]
