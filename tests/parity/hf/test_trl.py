"""TRL's Trainers, offloaded: the same numbers, with losses that multiply with the head's weight themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lt_offload
from lt_offload.errors import UnsupportedError
from scripts.hf import cases
from scripts.hf.runs import BUDGETS, compare, home, quiet
from tests.sampling import grid

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with home() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "budget"), grid(cases.TRL, BUDGETS, count=2))
def test_a_run_is_the_plain_one(case: str, budget: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL sends word of every Trainer elsewhere
    _, differs = compare(cases.TRL[case], budget, folder)
    assert differs == []


def test_a_trainer_that_generates_is_refused_where_it_is_made(folder: Path) -> None:
    import trl

    with quiet():
        args = trl.GRPOConfig(output_dir=str(folder), bf16=False, use_cpu=True, report_to=[], num_generations=2)
    data = cases.text().rename_column("text", "prompt")
    with (
        quiet(),
        lt_offload.hf_trainer(memory="1GB"),
        pytest.raises(UnsupportedError, match="GRPOTrainer: .*; use SFT"),
    ):
        trl.GRPOTrainer(str(folder / "model"), reward_funcs=len, args=args, train_dataset=data)
