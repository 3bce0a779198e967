"""Models write text in the middle of training, or learn from pairs as in DPO: the same as in plain Lightning."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from tests import sampling
from tests.support import models
from tests.support.engines import equal
from tests.support.trainers import Forced, Module, Run, differences, fit, seeded_module

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


# -- pairs: several forwards per training step, and a reference without gradients --------------------------------------


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


# -- forwards whose loss is dropped ------------------------------------------------------------------------------------


class Choosing(Module):  # type: ignore[misc]
    """Calls the model twice per step; of the losses only some count, ``chosen`` in turn."""

    def __init__(self, chosen: Sequence[str]) -> None:
        super().__init__()
        self.chosen = chosen

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        first = self.model(**batch).loss
        second = self.model(**{**batch, "input_ids": batch["input_ids"].flip(0)}).loss
        losses = {"first": first, "second": second, "both": first + second}
        loss: Tensor = losses[self.chosen[batch_idx % len(self.chosen)]]
        self.losses.append(loss.detach().clone())
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "settings"),
    sampling.grid(
        [("second",), ("both", "second"), ("second", "first")],
        [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}],
        count=2,
    ),
)
def test_a_loss_that_is_dropped_leaves_the_others_update(chosen: Sequence[str], settings: dict[str, Any]) -> None:
    def trained(strategy: Any) -> Run:
        torch.manual_seed(7)
        return fit(strategy, Choosing(chosen), max_epochs=1, **settings)

    stock = trained("auto")
    for memory in sampling.one((700_000, 1_500_000, 50_000_000)):
        assert differences(stock, trained(OffmateStrategy(memory=memory))) == []
