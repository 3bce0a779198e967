"""A GradScaler under a Trainer, as of 16-mixed: scales, skipped steps, weights and states of stock Lightning.

Lightning makes no scaler on a CPU, but takes one: that of a GPU is in ``tests/gpu/users/test_precision.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lt_offload import OffmateStrategy
from lt_offload.errors import PlanError
from tests import sampling
from tests.support.trainers import Run, budgets, differences, fit, seeded_module, state_differences, tight

UPDATES = 6
BEFORE_STEPS = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
"""Lightning steps the schedule though the first step of the optimizer is left out, and torch warns of it."""


pytestmark = pytest.mark.usefixtures("hostile")


class Scales(lightning.pytorch.Callback):
    """The scale after each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


class Looks(Scales):
    """The same, and norms of gradients wherever a hook may look at them."""

    def _look(self, module: Any) -> None:
        norms = [float(p.grad.norm().nan_to_num()) for p in module.parameters() if p.grad is not None]
        self.seen += norms

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._look(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look(pl_module)
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.5)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look(pl_module)


def scaler() -> torch.amp.GradScaler:
    """Every third step is left out, beginning with the first; no scale is a power of two."""
    return torch.amp.GradScaler("cpu", 3e10, growth_factor=1e6, backoff_factor=1e-6, growth_interval=2)


def module_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    module = seeded_module(**options)

    def configure() -> dict[str, Any]:
        optimizer = make([p for p in module.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure
    return module


def scaled(strategy: Any, make: Any = torch.optim.AdamW, watch: type[Scales] = Scales, **settings: Any) -> Run:
    options = settings.pop("model", {"dropout": 0.1})
    precision = MixedPrecision("16-mixed", "cpu", scaler())  # type: ignore[arg-type]
    settings = {"max_steps": UPDATES, "max_epochs": -1, "callbacks": [watch()], "plugins": [precision]} | settings
    return fit(strategy, module_of(make, **options), **settings)


def compared(one: Run, other: Run) -> list[str]:
    scales = [run.trainer.callbacks[0].seen for run in (one, other)]
    states = [run.trainer.precision_plugin.scaler.state_dict() for run in (one, other)]
    return differences(one, other) + ["scales"] * (scales[0] != scales[1]) + ["scaler"] * (states[0] != states[1])


def fused(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
    {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    {"make": fused},
    {"make": sgd, "gradient_clip_val": 0.1},
    {"watch": Looks},
    {"watch": Looks, "gradient_clip_val": 0.1},
    {"model": {"family": "llama-tied"}},
    {"model": {"lora": True, "dropout": 0.1}, "accumulate_grad_batches": 2},
    {"model": {"family": "phi"}},
    {"model": {"lora": True, "dtype": torch.float16}, "gradient_clip_val": 0.1},
]
WAYS: list[dict[str, Any]] = [{}, {"recompute": False}, {"activation_offload": False}, {"planner": "l2l"}]


@pytest.mark.parametrize(("settings", "way"), sampling.grid(SETTINGS, WAYS, count=4), ids=str)
@BEFORE_STEPS
def test_every_budget_equals_stock(settings: dict[str, Any], way: dict[str, Any]) -> None:
    stock = scaled("auto", **settings)
    scales = stock.trainer.callbacks[0].seen
    assert "watch" in settings or _left_out(scales)[:1] != _left_out(scales)
    for memory in budgets(seeded_module(**settings.get("model", {}))):
        ours = scaled(OffmateStrategy(memory=memory, **way), **settings)
        assert compared(stock, ours) == []
        assert ours.trainer.strategy.plan.delayed


def _left_out(scales: list[float]) -> list[int]:
    """Return the batches whose step was left out: the scale is less afterwards."""
    return [at for at, (before, after) in enumerate(zip([3e10, *scales], scales, strict=False)) if after < before]


@BEFORE_STEPS
@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.1}, {"make": fused, "accumulate_grad_batches": 2}])
def test_runs_are_resumed_before_and_after_steps_that_are_left_out(settings: dict[str, Any], tmp_path: Path) -> None:
    def memory() -> OffmateStrategy:
        return OffmateStrategy(memory=tight(seeded_module(dropout=0.1)))

    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"enable_checkpointing": True, **settings}
    whole = scaled(memory(), callbacks=[Scales(), save], **options)
    stock = scaled("auto", callbacks=[Scales()], **settings)
    assert compared(stock, whole) == []
    for step in sampling.some([*range(1, UPDATES)], 2):
        resumed = scaled(memory(), ckpt=tmp_path / f"step={step}.ckpt", **options | {"enable_checkpointing": False})
        assert state_differences(stock, resumed) == []
        left = resumed.trainer.callbacks[0].seen
        assert left == stock.trainer.callbacks[0].seen[-len(left) :]
        saved = [run.trainer.precision_plugin.scaler.state_dict() for run in (stock, resumed)]
        assert saved[0] == saved[1]


class Norms(Scales):
    """The norm that is logged."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        norm = trainer.strategy.engine.stats.grad_norm
        self.seen.append(0.0 if norm is None else norm)


@BEFORE_STEPS
def test_the_norm_that_is_logged_is_that_of_the_gradients_and_none_where_no_update_has_used_them() -> None:
    def norms(make: Any) -> list[float]:
        run = scaled(OffmateStrategy(memory="1GB"), make, watch=Norms, log_every_n_steps=1)
        return list(run.trainer.callbacks[0].seen)

    plain, unscaled_in_the_step = norms(torch.optim.AdamW), norms(fused)
    assert plain[0] == 0.0
    assert 0 < plain[1] < 100
    assert unscaled_in_the_step[1] == pytest.approx(plain[1])


def test_gradients_that_a_fused_optimizer_unscales_are_not_clipped_as_in_stock_lightning() -> None:
    said = []
    for strategy in ("auto", OffmateStrategy(memory="1GB")):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping") as caught:
            scaled(strategy, fused, gradient_clip_val=0.1)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_plan_whose_updates_do_not_wait_is_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    fit(OffmateStrategy(memory="1GB", report_dir=tmp_path), module_of(torch.optim.AdamW), max_steps=1)
    with pytest.raises(PlanError, match="plan again"):
        scaled(OffmateStrategy(plan=path), model={})
