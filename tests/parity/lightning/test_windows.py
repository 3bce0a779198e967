"""Gradient accumulation under a Trainer: the offmate strategy against the stock one, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor
from torch.utils.data import default_collate

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.plan import Choices
from lt_offload.strategy import windows
from tests import sampling
from tests.support.profiles.budgets import named_by
from tests.support.trainers import Module, Run, Tokens, budgets, differences, fit, seeded_module

pytestmark = pytest.mark.usefixtures("hostile")


class Padded(Module):
    """Lets a padded row be planned for: attention takes more with a mask, and the first row needs none."""

    def sample_batch(self) -> dict[str, Tensor]:
        rows = Tokens(self.model, 1 + self.batch_size, 0)
        return default_collate([rows[1 + i] for i in range(self.batch_size)])


def padded(options: dict[str, Any]) -> Padded:
    lightning.pytorch.seed_everything(7, verbose=False)
    return Padded(**options)


MODELS: list[dict[str, Any]] = [{"dropout": 0.1, "layers": 6}, {"dropout": 0.1, "lora": True}, {"family": "llama-tied"}]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "precision"), sampling.grid(MODELS, ["32-true", "bf16-true"], count=3))
def test_windows_with_a_last_short_one_equal_stock(options: dict[str, Any], precision: Any) -> None:
    for memory in budgets(seeded_module(**options)):  # 3 batches per epoch: windows of 2 and 1
        settings: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2}
        stock = fit("auto", padded(options), **settings)
        ours = fit(OffmateStrategy(memory=memory), padded(options), **settings)
        assert differences(stock, ours) == []
        assert stock.trainer.global_step == 4
        assert ours.trainer.strategy.plan.window == 2


ONE_BY_ONE: dict[str, Any] = {"layers": 6, "batch_size": 1}
"""6 batches per epoch."""
EPOCHS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], int, int]] = {
    **{
        f"of {window}": (
            {"dropout": 0.1},
            lambda window=window: {"accumulate_grad_batches": window, "max_epochs": 3, "log_every_n_steps": 1},
            window,
            6,
        )
        for window in (3, 4)
    },
    "by a schedule": (
        {},
        lambda: {"callbacks": [GradientAccumulationScheduler(scheduling={0: 1, 1: 4, 2: 3})], "max_epochs": 3},
        4,
        6 + 2 + 2,
    ),
    "with validations in the middle": ({}, lambda: {"accumulate_grad_batches": 4, "val_check_interval": 1}, 4, 4),
}
"""Options of the model and settings of the Trainer, the planned window, and the updates."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.some([*EPOCHS], 3))
def test_windows_over_several_epochs(name: str) -> None:
    options, settings, window, updates = EPOCHS[name]
    options = ONE_BY_ONE | options
    for memory in budgets(seeded_module(**options)):
        stock = fit("auto", padded(options), **settings())
        ours = fit(OffmateStrategy(memory=memory), padded(options), **settings())
        assert differences(stock, ours) == []
        assert stock.trainer.global_step == updates
        assert ours.trainer.strategy.plan.window == window
        assert ("validations" in name) == (len(ours.module.validation) > 6)
        logged = stock.trainer.callback_metrics
        assert all(torch.equal(value, ours.trainer.callback_metrics[name]) for name, value in logged.items())


@pytest.mark.slow
def test_batch_size_auto_splits_the_samples_of_an_update() -> None:
    options: dict[str, Any] = {"layers": 4}
    for memory in budgets(seeded_module(**options)):
        module = seeded_module(**options)
        ours = fit(OffmateStrategy(memory=memory, batch_size="auto"), module, accumulate_grad_batches=3, max_epochs=1)
        size, count = module.batch_size, ours.trainer.accumulate_grad_batches
        assert size * count == 2 * 3
        assert ours.trainer.strategy.plan.window == count
        assert ours.trainer.strategy.plan.batch_size == size
        stock = fit("auto", seeded_module(batch_size=size, **options), accumulate_grad_batches=count, max_epochs=1)
        assert differences(stock, ours) == []


def test_batch_size_auto_keeps_the_split_of_the_run_that_goes_on(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 1}
    module = seeded_module(batch_size=1)
    saving = {"callbacks": [saver], "enable_checkpointing": True}
    fit(OffmateStrategy(memory="200MB"), module, **settings, **saving)  # size 1, twice
    resumed = seeded_module(batch_size=2)
    path = tmp_path / "step=1.ckpt"
    with pytest.warns(UserWarning, match="after 2 batches of its epoch"):
        ours = fit(OffmateStrategy(memory="200MB", batch_size="auto"), resumed, ckpt=path, **settings)
    assert (resumed.batch_size, ours.trainer.accumulate_grad_batches) == (1, 4)
    with pytest.raises(ConfigError, match="3 samples per update .* no multiple of batch_size=2"):
        windows.split(ours.trainer, Choices(samples=3), 2, 1)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_in_the_middle_is_left_out_as_in_stock() -> None:
    runs = []
    for strategy in ("auto", OffmateStrategy(memory="200MB")):
        module = seeded_module(batch_size=1)
        step = module.training_step
        module.training_step = lambda batch, batch_idx, step=step: None if batch_idx == 1 else step(batch, batch_idx)
        runs.append(fit(strategy, module, accumulate_grad_batches=3))
    assert differences(*runs) == []


def smallest(options: dict[str, Any], offload: bool, **settings: Any) -> int:
    """Return the memory that the error for too little names."""
    strategy = OffmateStrategy(memory=10_000, activation_offload=offload)
    return named_by(lambda: fit(strategy, padded(options), **settings))


CLIPPINGS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": 1e-3},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize(("options", "clipping"), sampling.grid(MODELS, CLIPPINGS, count=3))
def test_after_a_last_step_without_a_loss_the_sums_are_used(
    options: dict[str, Any], clipping: dict[str, Any], forward: bool
) -> None:
    def run(strategy: Any) -> Run:
        module = padded(options | {"batch_size": 1})
        step = module.training_step

        def training_step(batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
            loss: Tensor | None = step(batch, batch_idx) if forward or batch_idx != 2 else None
            return loss if batch_idx != 2 else None

        module.training_step = training_step
        return fit(strategy, module, **settings)

    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "log_every_n_steps": 1, **clipping}
    stock = run("auto")
    for offload in (True, False):
        least = smallest(options | {"batch_size": 1}, offload, **settings)
        for memory in sampling.one((least, 2 * least, 200_000_000)):
            assert differences(stock, run(OffmateStrategy(memory=memory, activation_offload=offload))) == []
    assert stock.trainer.global_step == 4


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


class Changing(lightning.pytorch.Callback):
    """Accumulates ``then`` micro-batches after the first ``saved``; stock would add to gradients that were used."""

    def __init__(self, saved: int, then: int) -> None:
        self.saved, self.then = saved, then

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.saved and trainer.current_epoch == 0:
            trainer.accumulate_grad_batches = self.then
            trainer.optimizers[0].zero_grad()


@pytest.mark.parametrize(("saved", "then"), sampling.some([(2, 3), (3, 2), (3, 1)], 2))
def test_a_run_goes_on_with_other_windows_as_if_it_had_changed_them(saved: int, then: int, tmp_path: Path) -> None:
    module = seeded_module(batch_size=1)
    expected = fit("auto", module, accumulate_grad_batches=saved, callbacks=[Changing(saved, then)])
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    saving = {"callbacks": [saver], "enable_checkpointing": True}
    settings: dict[str, Any] = {"accumulate_grad_batches": saved, "max_epochs": 1, **saving}
    fit(OffmateStrategy(memory="200MB"), seeded_module(batch_size=1), **settings)
    message = f"after {saved} batches of its epoch, where no window of accumulate_grad_batches={then} ends"
    with pytest.warns(UserWarning, match=message) if saved % then else nullcontext():
        resumed = fit(
            OffmateStrategy(memory="200MB"),
            seeded_module(batch_size=1),
            ckpt=tmp_path / "step=1.ckpt",
            accumulate_grad_batches=then,
        )
    weights, found = expected.module.state_dict(), resumed.module.state_dict()
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    assert resumed.trainer.global_step == expected.trainer.global_step


def test_a_window_longer_than_the_epoch_is_said_and_trained_as_in_stock() -> None:
    stock = fit("auto", accumulate_grad_batches=8)
    with pytest.warns(UserWarning, match="accumulate_grad_batches=8 is more than the 3 batches of an epoch"):
        ours = fit(OffmateStrategy(memory="200MB"), accumulate_grad_batches=8)
    assert differences(stock, ours) == []
    assert ours.trainer.global_step == 2


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """A process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_waits_for_the_end_of_the_window(tmp_path: Path) -> None:
    class Interrupting(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGINT)

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=100)
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "enable_checkpointing": True}
    with pytest.raises(SystemExit):
        fit(OffmateStrategy(memory="200MB"), seeded_module(batch_size=1), callbacks=[saver, Interrupting()], **settings)
    path = tmp_path / "interrupted.ckpt"
    assert torch.load(path)["global_step"] == 2
    resumed = fit(OffmateStrategy(memory="200MB"), seeded_module(batch_size=1), ckpt=path, accumulate_grad_batches=3)
    expected = fit("auto", seeded_module(batch_size=1), accumulate_grad_batches=3)
    weights, found = expected.module.state_dict(), resumed.module.state_dict()
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_an_error_in_the_middle_of_a_window_saves_the_last_update(tmp_path: Path) -> None:
    module = seeded_module(batch_size=1)
    step = module.training_step

    def failing(batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 4:
            raise RuntimeError("on purpose")
        loss: Tensor = step(batch, batch_idx)
        return loss

    module.training_step = failing
    saver = ModelCheckpoint(tmp_path, filename="last", save_on_exception=True)
    with pytest.warns(UserWarning, match="gradients of 1 micro-batches"), pytest.raises(RuntimeError, match="purpose"):
        fit(
            OffmateStrategy(memory="200MB"),
            module,
            accumulate_grad_batches=3,
            callbacks=[saver],
            enable_checkpointing=True,
        )
    saved = torch.load(tmp_path / "last.ckpt")
    weights = fit("auto", seeded_module(batch_size=1), accumulate_grad_batches=3, max_steps=1).module.state_dict()
    assert saved["global_step"] == 1
    assert all(torch.equal(saved["state_dict"][name], weights[name]) for name in weights)
