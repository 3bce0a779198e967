"""Clipping under a Trainer: the offmate strategy against the stock one, bit for bit."""

from __future__ import annotations

import copy
import types
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from lt_offload.errors import UnsupportedError
from tests import sampling
from tests.parity.models.test_models import TRIALS, batches
from tests.support.trainers import Run, budgets, differences, fit, seeded_module

pytestmark = pytest.mark.usefixtures("hostile")


SETTINGS: list[dict[str, Any]] = [{}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}]
MODELS: list[dict[str, Any]] = [{"dropout": 0.1, "layers": 6}, {"family": "llama-tied"}]


@pytest.mark.parametrize(("options", "settings"), sampling.grid(MODELS, SETTINGS, count=3))
def test_clipping_by_norm_equals_stock(options: dict[str, Any], settings: dict[str, Any]) -> None:
    stock = fit("auto", seeded_module(**options), gradient_clip_val=0.1, **settings)
    for memory in budgets(seeded_module(**options)):
        ours = fit(OffmateStrategy(memory=memory), seeded_module(**options), gradient_clip_val=0.1, **settings)
        assert differences(stock, ours) == []
        assert ours.trainer.strategy.plan.delayed
        assert "clip_gradients" not in vars(ours.trainer.precision_plugin)
    free = fit("auto", seeded_module(**options), **settings)
    assert differences(stock, free) != [], "there was nothing to clip"


@pytest.mark.parametrize("settings", sampling.some(SETTINGS, 2), ids=str)
def test_clipping_by_value_equals_stock(settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {"dropout": 0.1, "layers": 6}
    clip: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    stock = fit("auto", seeded_module(**options), **clip, **settings)
    for memory in budgets(seeded_module(**options)):
        ours = fit(OffmateStrategy(memory=memory), seeded_module(**options), **clip, **settings)
        assert differences(stock, ours) == []
        assert not ours.trainer.strategy.plan.delayed
    free = fit("auto", seeded_module(**options), **settings)
    assert differences(stock, free) != [], "there was nothing to clip"


# -- what a module decides ---------------------------------------------------------------------------------------------


def by_norm(module: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    if module.trainer.global_step % 2:
        module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def by_value(module: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    if module.trainer.global_step % 2 == 0:
        module.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def by_both(module: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    module.clip_gradients(optimizer, 0.1, "norm")
    module.clip_gradients(optimizer, 1e-3, "value")


def clipping(hook: Any, **options: Any) -> Any:
    module = seeded_module(**options)
    module.configure_gradient_clipping = types.MethodType(hook, module)
    return module


def by_torch(module: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)


@pytest.mark.parametrize(
    ("hook", "settings"),
    sampling.some(
        [
            (by_norm, {}),
            (by_torch, {"accumulate_grad_batches": 2}),
            (by_norm, {"accumulate_grad_batches": 2}),
            (by_value, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
            (by_both, {}),
        ],
        3,
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_configure_gradient_clipping_asks_for_is_done(hook: Any, settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {"dropout": 0.1, "layers": 6}
    stock = fit("auto", clipping(hook, **options), **settings)
    for memory in budgets(seeded_module(**options)):
        ours = fit(OffmateStrategy(memory=memory), clipping(hook, **options), **settings)
        assert differences(stock, ours) == []
        assert "clip_gradients" not in vars(ours.trainer.precision_plugin)
    once = fit("auto", seeded_module(**options), **settings)
    assert differences(stock, once) != [], "the hook decides nothing"


def by_both_ways(module: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    module.clip_gradients(optimizer, 1.0, "norm")
    by_torch(module, optimizer)


def the_wrong_way_round(module: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    module.clip_gradients(optimizer, 1e-3, "value")
    module.clip_gradients(optimizer, 0.1, "norm")


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (by_both_ways, "the gradient of .* was used by"),
        (the_wrong_way_round, "gradients that are clipped already"),
    ],
)
def test_gradients_that_are_clipped_already_are_not_to_be_looked_at(hook: Any, message: str) -> None:
    module = clipping(hook)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UnsupportedError, match=message):
        fit(OffmateStrategy(memory="200MB"), module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    sampling.some(
        [
            {"accumulate_grad_batches": 3},
            {"gradient_clip_val": 0.1},
            {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
            {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
        ],
        2,
    ),
    ids=str,
)
def test_the_norm_that_is_logged_is_that_before_clipping(settings: dict[str, Any]) -> None:
    norms: list[float] = []

    def watched(
        module: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        module.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    options: dict[str, Any] = {"layers": 6}
    once: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, **settings}
    stock = fit("auto", clipping(watched, **options), **once)
    for memory in budgets(seeded_module(**options)):
        ours = fit(OffmateStrategy(memory=memory), seeded_module(**options), **once)
        assert float(ours.trainer.callback_metrics["grad_norm"]) == pytest.approx(norms[-1], rel=1e-5)
        assert torch.equal(ours.trainer.callback_metrics["loss"], stock.trainer.callback_metrics["loss"])


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_gradients_that_are_not_finite_do_what_they_do_in_stock(settings: dict[str, Any]) -> None:
    def spoilt(strategy: Any) -> Run:
        module = seeded_module(layers=4)
        step = module.training_step
        module.training_step = lambda batch, batch_idx: step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1)
        return fit(strategy, module, max_epochs=1, **settings)

    stock = spoilt("auto")
    with pytest.warns(UserWarning, match="the loss of step . is not finite"):
        ours = spoilt(OffmateStrategy(memory="200MB"))
    weights, found = stock.module.state_dict(), ours.module.state_dict()
    assert all(torch.equal(value.nan_to_num(), found[name].nan_to_num()) for name, value in weights.items())
    assert all(torch.equal(value.isnan(), found[name].isnan()) for name, value in weights.items())
    assert not all(value.isfinite().all() for value in weights.values())


class Pictures(lightning.pytorch.LightningModule):
    """Has parameters outside its blocks: patches and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TRIALS["ViT"].model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(batches("ViT"), batch_size=None)  # type: ignore[arg-type]


class WatchedPictures(Pictures):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


ALGORITHMS = [("norm", 0.1), ("value", 1e-3)]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "settings"), sampling.grid(ALGORITHMS, [{}, {"accumulate_grad_batches": 2}]))
def test_parameters_outside_the_blocks_are_clipped_with_the_others(
    algorithm: tuple[str, float], settings: dict[str, Any]
) -> None:
    name, value = algorithm
    clip = {"gradient_clip_val": value, "gradient_clip_algorithm": name, **settings}
    watched = fit("auto", WatchedPictures(), **clip).module
    stock = watched.state_dict()
    for memory in budgets(watched):
        run = fit(OffmateStrategy(memory=memory), Pictures(), log_every_n_steps=1, **clip)
        ours = run.module.state_dict()
        assert float(run.trainer.callback_metrics["grad_norm"]) == pytest.approx(watched.norm, rel=1e-5)
        assert [name for name in stock if not torch.equal(stock[name], ours[name])] == []
