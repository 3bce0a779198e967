"""Every kind of batches under the strategy: the numbers of the stock strategy, and room for whatever batch comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
from torch import Tensor

import lt_offload
from lt_offload import OffmateStrategy
from lt_offload.execute.engine import Engine
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from tests import sampling
from tests.support import tiny
from tests.support.trainers import Run, differences, profiled, state_differences, trainer

LENGTH = 64
STEPS = 4


class Recording(FineTune):
    """Keeps its losses, and looks at the batches."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.losses: list[Tensor] = []
        self.validation: list[Tensor] = []
        self.lrs: list[float] = []
        self.documents: list[int] = []
        self.widths: list[int] = []
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        self.widths.append(batch["input_ids"].shape[1])
        self.rows.append(len(batch["input_ids"]))
        if "position_ids" in batch:
            self.documents.append(int((batch["position_ids"] == 0).sum()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation.append(self._means(batch)[0].detach().clone())


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
    strategy: Any,
    folder: Path,
    text: Path,
    *,
    parts: int = 1,
    data: dict[str, Any] | None = None,
    ckpt: Path | None = None,
    **settings: Any,
) -> Run:
    """Train; the stock strategy with blocks in ``parts`` by the reference."""
    lightning.pytorch.seed_everything(7, verbose=False)
    source = FineTuneData(
        str(folder), path=str(text), **{"max_length": LENGTH, "batch_size": 2, "validation_rows": 3} | (data or {})
    )
    module = Recording(str(folder), lr=1e-2, schedule="constant")
    made = trainer(strategy, **{"max_steps": STEPS, "max_epochs": -1} | settings)
    module.configure_model()
    assert module.model is not None
    with lt_offload.micro_batched_reference(module.model, parts) if parts > 1 else nullcontext():
        made.fit(module, datamodule=source, ckpt_path=ckpt, weights_only=True)
    return Run(module, made)


@pytest.fixture(scope="module")
def stock(folder: Path, text: Path) -> Any:
    @cache
    def trained(accumulate: int, parts: int, mode: str) -> Run:
        return fit("auto", folder, text, parts=parts, data=MODES[mode], accumulate_grad_batches=accumulate)

    return trained


MODES: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"pack": False, "group_by_length": True},
    "padded, some left": {"pack": False, "batch_size": 4},
    "wrapped": {"pack": "wrapped"},
    "streamed": {"streaming": True, "stream_buffer": 6},
}
CASES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "tight": ("packed", "900kB", {}, 1),
    "middle": ("packed", "1300kB", {}, 1),
    "resident": ("packed", "100MB", {}, 1),
    "tight, offloaded": ("packed", "900kB", {"recompute": False}, 1),
    "in parts": ("packed", "100MB", {"micro_batches": 2}, 1),
    "tight, padded": ("padded", "900kB", {}, 1),
    "tight, wrapped": ("wrapped", "900kB", {}, 1),
    "tight, streamed": ("streamed", "900kB", {}, 1),
}


@pytest.mark.parametrize("case", sampling.some(list(CASES), 4))
def test_training_is_that_of_the_stock_strategy(folder: Path, text: Path, stock: Any, case: str) -> None:
    mode, memory, options, accumulate = CASES[case]
    strategy = OffmateStrategy(memory=memory, solver_time_limit=1000, **options)
    run = fit(strategy, folder, text, data=MODES[mode], accumulate_grad_batches=accumulate)
    if mode == "packed":
        assert 2 in run.module.documents, "two sequences of one document each: nothing to mask"
        assert max(run.module.documents) > 3
    if mode == "padded":
        assert len(set(run.module.widths)) > 1
    assert differences(stock(accumulate, options.get("micro_batches", 1), mode), run) == []


ACCUMULATED: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "tight": ("padded", "900kB", {}, 3),
    "middle": ("packed", "1300kB", {}, 2),
    "resident, in parts": ("streamed", "100MB", {"micro_batches": 2}, 3),
}


@pytest.mark.parametrize("case", ACCUMULATED)
def test_the_mean_over_the_tokens_of_an_update_is_that_of_the_stock_strategy(
    folder: Path, text: Path, stock: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def with_the_loss(measure: Callable[[], Profile], _: Any) -> Profile:
        found = measure()
        fused = tuple(option for option in found.blocks[-1].options if option.name == "fused")
        return replace(found, blocks=(*found.blocks[:-1], replace(found.blocks[-1], options=fused)))

    mode, memory, options, accumulate = ACCUMULATED[case]
    profiled(monkeypatch, with_the_loss)
    strategy = OffmateStrategy(memory=memory, solver_time_limit=1000, **options)
    run = fit(strategy, folder, text, data=MODES[mode], accumulate_grad_batches=accumulate)
    assert strategy.plan is not None
    assert strategy.plan.options[-1] == "fused", "the loss is computed within the last block"
    assert differences(stock(accumulate, options.get("micro_batches", 1), mode), run) == []


LEFT: dict[str, tuple[str, dict[str, Any], int]] = {
    "tight, again": ("1100kB", {"activation_offload": False}, 1),
    "middle": ("1300kB", {}, 2),
    "resident, in parts": ("100MB", {"micro_batches": 2}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LEFT)
def test_the_last_batch_of_an_epoch_has_the_rows_that_are_left(
    folder: Path, text: Path, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    memory, options, accumulate = LEFT[case]
    taken: list[tuple[Trace, int]] = []
    trace = Engine.trace

    def noted(engine: Engine) -> Trace:
        taken.append((trace(engine), engine.recorder.iterations))
        return taken[-1][0]

    monkeypatch.setattr(Engine, "trace", noted)

    def made() -> OffmateStrategy:
        return OffmateStrategy(memory=memory, solver_time_limit=1000, **options)

    settings: dict[str, Any] = {"data": MODES["padded, some left"], "accumulate_grad_batches": accumulate}
    run = fit(made(), folder, text, **settings)
    assert run.module.rows == [4, 4, 4, 3] * accumulate
    expected = stock(accumulate, options.get("micro_batches", 1), "padded, some left")
    assert differences(expected, run) == []
    if accumulate == 1:
        assert [done for found, done in taken if found is run.trainer.strategy.trace] == [3], "of a whole batch"
        return
    fit(made(), folder, text, max_steps=1, **settings).trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = fit(made(), folder, text, ckpt=tmp_path / "stop.ckpt", **settings)
    assert resumed.module.rows == run.module.rows[2:]
    assert state_differences(expected, resumed) == []


@pytest.mark.parametrize(("strategy", "stop"), [("auto", 1), ("offmate", 3)])
def test_a_stream_goes_on_where_the_run_stopped(
    folder: Path, text: Path, stock: Any, tmp_path: Path, strategy: str, stop: int
) -> None:
    data = MODES["streamed"]

    def made() -> Any:
        return OffmateStrategy(memory="1300kB", solver_time_limit=1000) if strategy == "offmate" else "auto"

    begun = fit(made(), folder, text, data=data, max_steps=stop)
    begun.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = fit(made(), folder, text, data=data, ckpt=tmp_path / "stop.ckpt")
    whole = stock(1, 1, "streamed")
    losses = begun.module.losses + resumed.module.losses
    assert len(losses) == STEPS
    assert all(left.equal(right) for left, right in zip(losses, whole.module.losses, strict=True))
    assert state_differences(whole, resumed) == []
