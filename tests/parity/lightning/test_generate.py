"""Models write text in the middle of training, under the plan: the same as in plain Lightning, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lt_offload import OffmateStrategy
from tests.support.engines import equal
from tests.support.trainers import Forced, Run, differences, fit, seeded_module

NEW_TOKENS = 4


class Writes(Callback):
    """Lets the model continue its input: greedily in validation, by sampling after training batches."""

    def __init__(self) -> None:
        self.written: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self._write(module, batch, do_sample=True)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._write(module, batch, do_sample=False)
        self._write(module, batch, do_sample=False, use_cache=False)

    def _write(self, module: Any, batch: Any, **options: Any) -> None:
        prompt = {name: batch[name][:, -6:] for name in ("input_ids", "attention_mask")}
        written = module.model.generate(**prompt, max_new_tokens=NEW_TOKENS, pad_token_id=0, **options)
        self.written.append(written.clone())


def run(strategy: Any, family: str) -> tuple[Run, list[Tensor]]:
    writes = Writes()
    module = seeded_module(family=family)
    return fit(
        strategy, module, callbacks=[writes], num_sanity_val_steps=1, val_check_interval=1, max_epochs=1
    ), writes.written


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "bloom"])
def test_what_is_written_and_trained_equals_stock(family: str) -> None:
    stock, expected = run("auto", family)
    weights = sum(p.nbytes for p in stock.module.parameters())
    for strategy in (
        Forced(),
        OffmateStrategy(memory=2 * weights, solver_time_limit=2),
        OffmateStrategy(memory="64MB", solver_time_limit=2),
    ):
        ours, written = run(strategy, family)
        assert len(written) == len(expected) > 10
        assert all(map(equal, written, expected))
        assert differences(stock, ours) == []
