"""Figures that are logged while a recipe trains: real tokens, the learning rate, phases of the clock, arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lt_offload import OffmateStrategy
from lt_offload.finetune.module import FineTune, LoraArgs, add_lora
from lt_offload.finetune.run.metrics import RunMetrics, _count, peak_of
from lt_offload.profiling.flops import product_flops_per_token
from lt_offload.report.runs import read_run
from lt_offload.strategy.metrics import Metrics, RunClock
from tests.support import models
from tests.unit.finetune.conftest import data, trainer

IDS = torch.zeros(2, 5, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        ({"input_ids": IDS}, [10, 10, 2]),
        ({"input_ids": IDS, "attention_mask": MASK}, [7, 10, 2]),
        ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS.where(MASK > 0, -100)}, [7, 5, 2]),
        ({"input_ids": IDS, "labels": IDS.where(MASK == 0, -100)}, [10, 3, 2]),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 1, 5, 5)}, [10, 10, 2]),
        (IDS, [10, 10, 0]),
        ("text", [0, 0, 0]),
    ],
)
def test_padding_is_no_token(batch: Any, counts: list[int]) -> None:
    assert _count(batch).tolist() == counts


class Seen(Callback):
    """What every batch of a run has, counted with the library's own means."""

    def __init__(self) -> None:
        self.tokens = self.trained = 0
        self.lrs: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.tokens += sum(int(row.sum()) for row in batch["attention_mask"])
        self.trained += sum(1 for row in batch["labels"] for label in row[1:] if label != -100)
        self.lrs.append(trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])


@pytest.mark.parametrize("strategy", ["auto", "offmate"])
def test_what_is_logged(strategy: str, folder: str, tmp_path: Path) -> None:
    rows = "\n".join(["x" * 60, "abc", "the quick brown fox", "jumps over", "the lazy dog"] * 4)
    (tmp_path / "rows.csv").write_text("text\n" + rows)
    source = data(folder, str(tmp_path / "rows.csv"), pack=False, max_length=100)
    metrics, seen = RunMetrics(RunClock()), Seen()
    run = trainer(
        6,
        metrics,
        seen,
        strategy=OffmateStrategy(memory="2MB") if strategy == "offmate" else "auto",
        accumulate_grad_batches=2 if strategy == "auto" else 1,
        logger=CSVLogger(str(tmp_path / "run"), name="", version=""),
        log_every_n_steps=2,
    )
    run.fit(FineTune(folder, lr=1e-2, warmup_steps=3), datamodule=source)
    assert (metrics.tokens, metrics.trained) == (seen.tokens, seen.trained)
    assert metrics.trained < metrics.tokens
    assert len(metrics.clock.steps) == 6
    assert sum(isinstance(callback, Metrics) for callback in run.callbacks) == 1, "the strategy adds no other one"
    found = read_run(tmp_path / "run")
    expected = {"tokens_per_s", "trained_tokens_per_s", "samples_per_s", "wall_step_s", "lr", "train_loss"}
    if strategy == "offmate":
        expected |= {"step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb", "grad_norm"}
        assert metrics.peaks["device_peak_bytes"] <= 2_000_000
    assert set(found.curves) - {"val_loss"} == {*expected, "epoch"}
    assert [step for step, _ in found.curve("lr")] == [2, 4, 6]
    per_step = len(seen.lrs) // 6
    assert [lr for _, lr in found.curve("lr")] == seen.lrs[per_step :: 2 * per_step], "as it was when the step began"


@pytest.mark.parametrize("tied", [True, False])
def test_arithmetic_of_a_token(tied: bool) -> None:
    model = models.build("llama", tie_word_embeddings=tied)
    weights = {id(p): p for p in model.parameters() if p.ndim > 1}
    table = model.get_input_embeddings().weight
    expected = 6 * sum(p.numel() for p in weights.values() if tied or p is not table)
    assert product_flops_per_token(model) == expected
    adapted = add_lora(model, LoraArgs(r=2))
    small = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert product_flops_per_token(adapted) == expected * 4 // 6 + 6 * small


def test_mixtures_of_experts_and_processors_are_not_guessed() -> None:
    assert product_flops_per_token(models.build("mixtral")) is None
    assert peak_of(torch.device("cpu"), "32-true", torch.float32) is None


def test_the_peak_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    peak = peak_of(torch.device("cuda"), "bf16-mixed", torch.float32)
    assert peak is not None
    assert 9e14 < peak < 2e15
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A card of next year")
    assert peak_of(torch.device("cuda"), "32-true", torch.bfloat16) is None
