"""Loaders with workers and pinned memory, and batches that move without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.gpu.users.runs import USERS, Bench, in_both_ways, module
from tests.support.trainers import BATCHES, Run, Tokens, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


@in_both_ways
def test_pinned_batches_of_a_worker(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        made = module(dropout=0.1)
        rows = Tokens(made.model, 2 * BATCHES - 1, 0)  # the last batch of an epoch is a smaller one
        pin = bench.device.type == "cuda"
        made.train_dataloader = lambda: DataLoader(rows, batch_size=2, num_workers=1, pin_memory=pin)

        def transfer(batch: dict[str, Any], device: torch.device, dataloader_idx: int) -> dict[str, Any]:
            pinned.append(all(value.is_pinned() for value in batch.values()))
            return {name: value.to(device, non_blocking=True) for name, value in batch.items()}

        pinned: list[bool] = []
        made.transfer_batch_to_device = transfer
        run = bench.fit(strategy, made)
        assert sum(pinned) == pin * run.trainer.global_step, "the batches that train; the profile has a copy of one"
        return run

    assert differences(*bench.compare(way, scene)) == []
