"""Training from pairs, as in DPO: several forwards per training step, and a reference without gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from tests import sampling
from tests.support import models
from tests.support.trainers import fit


class Preference(LightningModule):
    """Compares with a copy of the model, or with the model without its adapters.

    Args:
        adapters: train LoRA adapters, without which the model is its own reference.
    """

    def __init__(self, *, adapters: bool) -> None:
        super().__init__()
        self.model: Any = models.build(lora=adapters)
        self.reference: Any = None if adapters else copy.deepcopy(self.model).requires_grad_(False)

    def scores(self, model: Any, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((-1, -2))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen, rejected = (self.scores(self.model, tokens) for tokens in batch)
        known, without = self.reference, nullcontext()
        if known is None:
            known, without = self.model, self.model.disable_adapter()
        with torch.no_grad(), without:
            expected = self.scores(known, batch[0]) - self.scores(known, batch[1])
        self.log("margin", (chosen - rejected).mean())
        return -F.logsigmoid(0.1 * (chosen - rejected - expected)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train_dataloader(self) -> Any:
        seeds = torch.Generator().manual_seed(0)
        pairs = [[torch.randint(0, models.VOCAB, (2, n), generator=seeds) for n in (8, 11)] for _ in range(3)]
        return DataLoader(pairs, batch_size=None)  # type: ignore[arg-type]


SETTINGS: list[dict[str, Any]] = [{}, {"gradient_clip_val": 0.1}]


@pytest.mark.parametrize(("adapters", "settings"), sampling.grid([True, False], SETTINGS, count=2))
def test_preferences_are_learnt_as_in_stock(adapters: bool, settings: dict[str, Any]) -> None:
    stock = fit("auto", Preference(adapters=adapters), **settings)
    expected = stock.module.state_dict()
    for memory in sampling.one((700_000, 1_500_000, 50_000_000)):
        ours = fit(OffmateStrategy(memory=memory), Preference(adapters=adapters), **settings)
        found = ours.module.state_dict()
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
        assert torch.equal(stock.trainer.callback_metrics["margin"], ours.trainer.callback_metrics["margin"])
        assert ours.trainer.strategy.plan.forwards == 2
        assert ours.trainer.strategy.plan.deferred_forwards == (2 if adapters else 1)
