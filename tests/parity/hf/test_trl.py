"""TRL's Trainers, offloaded: the same numbers, with losses that multiply with the head's weight themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.hf import cases
from scripts.hf.runs import BUDGETS, compare, home
from tests.sampling import grid

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with home() as found:
        yield found


@pytest.mark.parametrize(("case", "budget"), grid(cases.TRL, BUDGETS, count=3))
def test_a_run_is_the_plain_one(case: str, budget: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL sends word of every Trainer elsewhere
    _, differs = compare(cases.TRL[case], budget, folder)
    assert differs == []
