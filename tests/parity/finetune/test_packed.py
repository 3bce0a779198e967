"""Packed documents under the strategy: the numbers of the stock strategy, and room for whatever batch comes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
from torch import Tensor

import lt_offload
from lt_offload import OffmateStrategy
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from tests.support import tiny
from tests.support.trainers import Run, differences, trainer

LENGTH = 64
STEPS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Recording(FineTune):
    """Keeps its losses, and looks at the batches."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.losses: list[Tensor] = []
        self.validation: list[Tensor] = []
        self.lrs: list[float] = []
        self.documents: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        if "position_ids" in batch:
            self.documents.append(int((batch["position_ids"] == 0).sum()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation.append(self._loss(batch).detach().clone())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of which some fill a sequence alone, so that batches with and without a mask take turns."""
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    lengths = [63, 63, 63, 63, 5, 17, 30, 8, 44, 12, 63, 63, 21, 63, 9, 63, 33, 63]
    path.write_text("\n".join(json.dumps({"text": "abcdefg " * 8})[: 10 + n] + '"}' for n in lengths))
    return path


def fit(
    strategy: Any, folder: Path, text: Path, *, parts: int = 1, data: dict[str, Any] | None = None, **settings: Any
) -> Run:
    """Train; the stock strategy with blocks in ``parts`` by the reference."""
    lightning.pytorch.seed_everything(7, verbose=False)
    source = FineTuneData(
        str(folder), path=str(text), **{"max_length": LENGTH, "batch_size": 2, "validation_rows": 3} | (data or {})
    )
    module = Recording(str(folder), lr=1e-2)
    made = trainer(strategy, max_steps=STEPS, max_epochs=-1, **settings)
    module.configure_model()
    assert module.model is not None
    with lt_offload.micro_batched_reference(module.model, parts) if parts > 1 else nullcontext():
        made.fit(module, datamodule=source)
    return Run(module, made)


@pytest.fixture(scope="module")
def stock(folder: Path, text: Path) -> Any:
    @cache
    def trained(accumulate: int, parts: int) -> Run:
        return fit("auto", folder, text, parts=parts, accumulate_grad_batches=accumulate)

    return trained


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "tight": ("900kB", {}, 1),
    "middle": ("1300kB", {}, 1),
    "resident": ("100MB", {}, 1),
    "tight, offloaded": ("900kB", {"recompute": False}, 1),
    "middle, accumulated": ("1300kB", {"solver_time_limit": 5}, 2),
    "in parts": ("100MB", {"micro_batches": 2}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_stock_strategy(folder: Path, text: Path, stock: Any, case: str) -> None:
    memory, options, accumulate = CASES[case]
    run = fit(OffmateStrategy(memory=memory, **options), folder, text, accumulate_grad_batches=accumulate)
    documents = run.module.documents
    assert 2 in documents
    assert max(documents) > 3, "batches of one document a row, and of several"
    assert differences(stock(accumulate, options.get("micro_batches", 1)), run) == []
