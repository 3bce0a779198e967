"""Batches that are larger than the one that was planned for: the same numbers where they fit, else a sentence."""

from __future__ import annotations

import re

import pytest
import torch

import lt_offload
from lt_offload.errors import OverBudget
from tests.support.engines import Result, differences
from tests.support.user_nets import Net, adamw, measured, ordinary, plain, planned, rows, seed


def longer(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    return [*rows(steps), *({name: ids.repeat(1, 4) for name, ids in batch.items()} for batch in rows(steps))]


def trained(budget: str) -> Result:
    model = Net()
    optimizer = adamw(model)
    with lt_offload.offloaded(model, optimizer, rows()[0], plan=planned(Net, budget), accelerator="cpu"):
        seed()
        losses = ordinary(model, optimizer, longer())
    return Result(losses, model, optimizer)


def test_what_does_not_fit_says_what_was_planned_for() -> None:
    assert measured(Net).sequence_length == 6
    with pytest.raises(OverBudget) as caught:
        trained("tight")
    assert re.fullmatch(
        r"a batch of 2 x 24 came, and the plan is for 2 x 6, as in sample_batch: memory=\S+ kB is too small for it as "
        "planned; give as sample_batch the largest batch that will come: the longest rows, filled up to one length",
        str(caught.value),
    )


def test_what_fits_trains() -> None:
    assert differences(plain(Net, lambda *given: ordinary(*given[:2], longer())), trained("resident")) == []
