"""Batches that grow while training: each that is larger than any planned for shows anew what to plan, and counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lt_offload import OffmateStrategy
from lt_offload.profiling.step.first import FirstStep
from tests import sampling
from tests.support.trainers import Module, differences, fit, state_differences, tight

LENGTHS = [(2, 4), (2, 3), (4, 4), (1, 9), (2, 10), (2, 9), (1, 10), (3, 10)]
"""Rows and length of each batch."""
SHOW = [0, 2, 3, 4, 7]
"""Those that have more rows or tokens than all before them."""


class Batches(Dataset[dict[str, Tensor]]):
    def __init__(self, padded: int) -> None:
        self.padded = padded

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows, length = LENGTHS[index]
        ids = torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(index))
        mask = torch.ones_like(ids)
        mask[-1, -1] = index != self.padded
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


class Growing(Module):
    def __init__(self, padded: int = 0) -> None:
        super().__init__()
        self.padded, self.seen = padded, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Batches(self.padded), batch_size=None)


class Named(Growing):
    """Names a batch to be measured that is as large as its first one, but not as large as what follows."""

    def worst_case_batch(self) -> Any:
        return Batches(self.padded)[0]


def seeded(kind: type[Growing] = Growing, **options: Any) -> Growing:
    L.seed_everything(7, verbose=False)
    return kind(**options)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that have shown what to plan."""
    found: list[int] = []
    returned = FirstStep.returned

    def noted(first: FirstStep, result: Any) -> Any:
        found.append(first.model.seen[-1])  # type: ignore[union-attr, index]
        return returned(first, result)

    monkeypatch.setattr(FirstStep, "returned", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("window", sampling.some([{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], 2))
@pytest.mark.parametrize("activation_offload", [True, False])
def test_each_that_is_larger_is_planned_for(window: dict[str, Any], activation_offload: bool, shown: list[int]) -> None:
    """Unless the plan of a smaller one leaves room for it, whatever the larger one takes."""
    stock = fit("auto", seeded(), **window, max_epochs=2)
    strategy = OffmateStrategy(memory=tight(seeded().model), activation_offload=activation_offload)
    ours = fit(strategy, seeded(), **window, max_epochs=2)
    assert differences(stock, ours) == []
    assert ours.module.seen == stock.module.seen
    assert len(shown) > 1
    assert shown == [index for index in SHOW if index in shown]
    assert strategy.plan is not None
    most = max((LENGTHS[index] for index in shown), key=math.prod)
    assert (strategy.plan.batch_size, strategy.plan.sequence_length) == most
    assert strategy.profile is not None
    steps = [index // window.get("accumulate_grad_batches", 1) + 1 for index in shown]
    assert [*dict.fromkeys(i for i in strategy.profile.iterations if i in steps)] == [*dict.fromkeys(steps)]


def test_what_has_begun_with_a_step_that_counts_goes_on_with_such(shown: list[int]) -> None:
    """The second micro-batch has padding, but fewer tokens than the batch that is named: sums wait to be carried on."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_train_batches": 2}
    stock = fit("auto", seeded(Named, padded=1), **settings)
    ours = fit(OffmateStrategy(memory="200MB"), seeded(Named, padded=1), **settings)
    assert differences(stock, ours) == []
    assert shown == [0, 1]


@pytest.mark.slow
def test_a_run_that_goes_on_has_room_for_what_was_shown(shown: list[int], tmp_path: Path) -> None:
    """Its first batch is a small one."""
    memory = tight(seeded().model)
    saver = ModelCheckpoint(tmp_path, filename="first", save_on_train_epoch_end=True)
    fit(OffmateStrategy(memory=memory), seeded(), callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    assert len(shown) > 1
    shown.clear()
    stock = fit("auto", seeded(), max_epochs=2)
    ours = fit(OffmateStrategy(memory=memory), seeded(), ckpt=tmp_path / "first.ckpt", max_epochs=2)
    assert state_differences(stock, ours) == []
    assert shown == [0]


def test_no_other_plan_is_made_where_there_is_memory_enough(shown: list[int]) -> None:
    stock, ours = fit("auto", seeded()), fit(OffmateStrategy(memory="200MB"), seeded())
    assert differences(stock, ours) == []
    assert shown == [0]


@pytest.mark.slow
@pytest.mark.sampled
def test_padding_takes_more(shown: list[int]) -> None:
    """Attention leaves a mask out that hides nothing."""
    stock, ours = fit("auto", seeded(padded=5)), fit(OffmateStrategy(memory="200MB"), seeded(padded=5))
    assert differences(stock, ours) == []
    assert shown == [0, 5]
