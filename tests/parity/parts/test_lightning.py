"""``OffmateStrategy(micro_batches=...)`` beside stock Lightning, whose blocks are cut by the reference."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import lt_offload
from lt_offload import OffmateStrategy, PlanError
from tests.support import trainers
from tests.support.trainers import differences, fit

SETTINGS: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}


def offmate(**options: Any) -> OffmateStrategy:
    """What is free changes from run to run, a saved plan does not."""
    return OffmateStrategy(**{"memory": 1 << 30, "host_memory": 1 << 34} | options)


def run(strategy: Any, parts: int = 1, **settings: Any) -> trainers.Run:
    module = trainers.seeded_module(batch_size=5, dropout=0.1)
    stock = lt_offload.micro_batched_reference(module.model, parts) if strategy == "auto" else nullcontext()
    with stock:
        return fit(strategy, module=module, **SETTINGS | settings)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_and_validation_are_those_of_stock_lightning(accumulate: int) -> None:
    theirs = run("auto", 3, accumulate_grad_batches=accumulate)
    strategy = offmate(micro_batches=3, planner="offmate")
    ours = run(strategy, accumulate_grad_batches=accumulate)
    assert differences(theirs, ours) == []
    assert differences(run("auto", 1, accumulate_grad_batches=accumulate), ours) != []
    assert strategy.plan is not None
    assert strategy.plan.parts == 3
    assert "times as fast" in strategy.plan.explain() or "no plan of it" in strategy.plan.explain()


@pytest.mark.slow
def test_a_saved_plan_is_replayed_with_its_parts(tmp_path: Path) -> None:
    run(offmate(micro_batches=2, report_dir=tmp_path))
    plan = tmp_path / "plan.json"
    assert differences(run("auto", 2), run(offmate(plan=plan, micro_batches=2))) == []
    assert differences(run("auto", 2), run(offmate(plan=plan, micro_batches="auto"))) == []
    with pytest.raises(PlanError, match="has micro_batches=2, .* and micro_batches=1 is set"):
        run(offmate(plan=plan))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_number_that_was_chosen(tmp_path: Path) -> None:
    first = run(offmate(micro_batches=2), max_epochs=1)
    path = tmp_path / "last.ckpt"
    first.trainer.save_checkpoint(path)
    strategy = offmate(micro_batches="auto")
    run(strategy, ckpt=path)
    assert strategy.profile is not None
    assert strategy.profile.parts == 2
    with pytest.warns(UserWarning, match="had micro_batches=2, this one has 3"):
        run(offmate(micro_batches=3), ckpt=path)
