"""Gradient accumulation under a Trainer: the offmate strategy against the stock one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor

from lt_offload import OffmateStrategy
from lt_offload.errors import PlanError, UnsupportedError
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.strategy import offmate
from tests.support.trainers import Run, differences, fit, seeded_module, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tasks as late as possible, overwrite freed memory and check the order of every access."""
    monkeypatch.setattr(offmate, "open_device", lambda budget, *_, **__: EmulatedDevice(budget, "lazy", check=True))


def both(options: dict[str, Any], memory: int | str, **settings: Any) -> tuple[Run, Run]:
    """Train with the stock strategy and with ours."""
    stock = fit("auto", seeded_module(**options), **settings)
    ours = fit(OffmateStrategy(memory=memory), seeded_module(**options), **settings)
    assert stock.trainer.global_step == ours.trainer.global_step
    return stock, ours


def small(options: dict[str, Any]) -> int:
    """A budget in which weights and states have to travel."""
    return 2 * sum(p.nbytes for p in seeded_module(**options).parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.1, "layers": 6}, {"dropout": 0.1, "lora": True}, {"family": "llama-tied"}],
    ids=str,
)
def test_windows_with_a_last_short_one_equal_stock(options: dict[str, Any], precision: Any) -> None:
    for memory in (small(options), "200MB"):  # 3 batches per epoch: windows of 2 and 1
        stock, ours = both(options, memory, precision=precision, accumulate_grad_batches=2)
        assert differences(stock, ours) == []
        assert stock.trainer.global_step == 4
        assert ours.trainer.strategy.plan.window == 2


def test_a_schedule_of_windows_equals_stock() -> None:
    options = {"layers": 6, "batch_size": 1}
    for memory in (small(options), "200MB"):
        schedule = {0: 1, 1: 4, 2: 3}
        runs = [
            fit(
                strategy,
                seeded_module(**options),
                max_epochs=3,
                callbacks=[GradientAccumulationScheduler(scheduling=dict(schedule))],
            )
            for strategy in ("auto", OffmateStrategy(memory=memory))
        ]
        assert differences(*runs) == []
        assert runs[0].trainer.global_step == runs[1].trainer.global_step == 6 + 2 + 2
        assert runs[1].trainer.strategy.plan.window == 4


def test_validation_in_the_middle_of_a_window() -> None:
    options = {"layers": 6, "batch_size": 1}
    for memory in (small(options), "200MB"):
        stock, ours = both(options, memory, accumulate_grad_batches=4, val_check_interval=1)
        assert differences(stock, ours) == []
        assert len(ours.module.validation) > 6


def test_batch_size_auto_with_windows() -> None:
    options = {"layers": 4}
    module = seeded_module(**options)
    ours = fit(OffmateStrategy(memory="100MB", batch_size="auto"), module, accumulate_grad_batches=2, max_epochs=1)
    assert ours.trainer.strategy.plan.window == 2
    stock = fit("auto", seeded_module(batch_size=module.batch_size, **options), accumulate_grad_batches=2, max_epochs=1)
    assert differences(stock, ours) == []


@pytest.mark.parametrize("at", [1, 3])
def test_an_error_in_the_middle_of_a_window_is_the_one_that_is_raised(at: int) -> None:
    module = seeded_module(batch_size=1)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    step = module.training_step

    def failing(batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = step(batch, batch_idx)
        if batch_idx == at:
            raise RuntimeError("on purpose")
        return loss

    module.training_step = failing
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(OffmateStrategy(memory="200MB"), module, accumulate_grad_batches=5)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_in_the_middle_is_left_out_as_in_stock() -> None:
    runs = []
    for strategy in ("auto", OffmateStrategy(memory="200MB")):
        module = seeded_module(batch_size=1)
        step = module.training_step
        module.training_step = lambda batch, batch_idx, step=step: None if batch_idx == 1 else step(batch, batch_idx)
        runs.append(fit(strategy, module, accumulate_grad_batches=3))
    assert differences(*runs) == []


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_window_whose_last_step_has_no_loss_is_refused() -> None:
    module = seeded_module(batch_size=1)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: None if batch_idx == 1 else step(batch, batch_idx)
    with pytest.raises(UnsupportedError, match="after 1 micro-batches had no backward"):
        fit(OffmateStrategy(memory="200MB"), module, accumulate_grad_batches=2)


def test_no_checkpoint_in_the_middle_of_a_window(tmp_path: Path) -> None:
    class Saving(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    with pytest.warns(UserWarning, match="gradients of 1 micro-batches since the last update"):
        fit(
            OffmateStrategy(memory="200MB"),
            seeded_module(batch_size=1),
            accumulate_grad_batches=2,
            max_epochs=1,
            callbacks=[Saving()],
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.ckpt", "3.ckpt", "5.ckpt"]


def test_a_run_with_windows_is_resumed_as_if_it_had_not_ended(tmp_path: Path) -> None:
    expected = fit("auto", accumulate_grad_batches=2)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    settings = {"accumulate_grad_batches": 2, "callbacks": [saver], "enable_checkpointing": True, "max_epochs": 1}
    fit(OffmateStrategy(memory="200MB"), **settings)
    for step in (1, 2):  # in the middle of the epoch, and at its end
        path = tmp_path / f"step={step}.ckpt"
        resumed = fit(OffmateStrategy(memory="200MB"), ckpt=path, accumulate_grad_batches=2)
        weights, found = expected.module.state_dict(), resumed.module.state_dict()
        assert all(torch.equal(weights[name], found[name]) for name in weights)
        assert resumed.trainer.global_step == expected.trainer.global_step == 4


def test_a_plan_for_one_micro_batch_is_refused_before_training(tmp_path: Path) -> None:
    ours = fit(OffmateStrategy(memory="200MB"), max_epochs=1)
    path = ours.trainer.strategy.plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="accumulate_grad_batches=2 needs room for sums"):
        fit(OffmateStrategy(memory="200MB", plan=path), accumulate_grad_batches=2)
    window = fit(OffmateStrategy(memory="200MB"), accumulate_grad_batches=3, max_epochs=1)
    path = window.trainer.strategy.plan.save(tmp_path / "plan.json")
    replayed = fit(OffmateStrategy(memory="200MB", plan=path), accumulate_grad_batches=2)
    assert differences(fit("auto", accumulate_grad_batches=2), replayed) == []


def test_what_is_logged_is_once_per_update() -> None:
    ours = fit(OffmateStrategy(memory="200MB"), accumulate_grad_batches=2, max_epochs=1, log_every_n_steps=1)
    stats = ours.trainer.callback_metrics
    assert stats["step_s"] > 0
    assert stats["grad_norm"] > 0
    assert trainer("auto", accumulate_grad_batches=2).accumulate_grad_batches == 2
