"""Checkpoints of one run loaded in another: with another budget, and so another plan, or another precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lt_offload import OffmateStrategy
from tests import sampling
from tests.support.profiles.budgets import BUDGETS, named_by, planning
from tests.support.trainers import BATCHES, Forced, fit, seeded_module, state_differences

pytestmark = pytest.mark.usefixtures("measured_once")


def strategy(budget: str, **settings: Any) -> OffmateStrategy:
    made = OffmateStrategy(memory="20KB", **planning(budget) | {"planner": "auto"})
    least = named_by(lambda: fit(made, seeded_module(dropout=0.1, batch_size=1), **settings))
    memory = int(least * BUDGETS[budget])
    return OffmateStrategy(memory=memory, async_checkpoint=budget == "middle", **planning(budget))


CHANGES = [("tight", "resident"), ("resident", "recomputing"), ("recomputing", "middle"), ("middle", "tight")]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), sampling.some(CHANGES, 2))
def test_a_run_goes_on_in_another_budget_in_the_middle_of_an_epoch(first: str, second: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2}
    whole = fit("auto", seeded_module(dropout=0.1, batch_size=1), **settings)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    saving = {"callbacks": [saver], "enable_checkpointing": True}
    fit(strategy(first, **settings), seeded_module(dropout=0.1, batch_size=1), max_epochs=1, **settings, **saving)
    path = tmp_path / "step=1.ckpt"
    found = fit(strategy(second, **settings), seeded_module(seed=99, dropout=0.1, batch_size=1), ckpt=path, **settings)
    assert state_differences(whole, found) == []
    assert len(found.module.losses) == 4 * BATCHES - 2
    for left, right in zip(whole.module.losses[2:], found.module.losses, strict=True):
        assert torch.equal(left, right)
    assert whole.module.lrs[2:] == found.module.lrs


@pytest.mark.parametrize(
    ("saved", "then"), [("bf16-true", "32-true"), ("32-true", "bf16-true"), ("32-true", "bf16-mixed")]
)
@pytest.mark.parametrize("ours", [False, True], ids=["from stock", "from ours"])
def test_another_precision_does_what_it_does_in_stock(saved: Any, then: Any, ours: bool, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=BATCHES)
    settings: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": 1}
    fit(Forced() if ours else "auto", seeded_module(shuffle=False), precision=saved, **settings)
    stock, found = [
        fit(one, seeded_module(seed=99, shuffle=False), ckpt=tmp_path / "half.ckpt", precision=then)
        for one in ("auto", Forced())
    ]
    assert state_differences(stock, found) == []
    for left, right in zip(stock.module.losses, found.module.losses, strict=True):
        assert torch.equal(left, right)
    dtypes = {value.dtype for value in found.optimizer.state[next(found.module.parameters())].values()}
    assert (torch.bfloat16 in dtypes) == (then == "bf16-true")
