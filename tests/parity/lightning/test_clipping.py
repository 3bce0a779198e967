"""Clipping under a Trainer: the offmate strategy against the stock one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lt_offload import OffmateStrategy
from lt_offload.errors import PlanError
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.strategy import offmate
from tests.support.trainers import differences, fit, seeded_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tasks as late as possible, overwrite freed memory and check the order of every access."""
    monkeypatch.setattr(offmate, "open_device", lambda budget, *_, **__: EmulatedDevice(budget, "lazy", check=True))


def small(options: dict[str, Any]) -> int:
    """A budget in which weights and states have to travel."""
    return 2 * sum(p.nbytes for p in seeded_module(**options).parameters())


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("options", [{"dropout": 0.1, "layers": 6}, {"family": "llama-tied"}], ids=str)
def test_clipping_by_norm_equals_stock(options: dict[str, Any], settings: dict[str, Any]) -> None:
    stock = fit("auto", seeded_module(**options), gradient_clip_val=0.1, **settings)
    for memory in (small(options), "200MB"):
        ours = fit(OffmateStrategy(memory=memory), seeded_module(**options), gradient_clip_val=0.1, **settings)
        assert differences(stock, ours) == []
        assert ours.trainer.strategy.plan.delayed
        assert "clip_gradients" not in vars(ours.trainer.precision_plugin)
    free = fit("auto", seeded_module(**options), **settings)
    assert differences(stock, free) != [], "there was nothing to clip"


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}], ids=str)
def test_clipping_by_value_equals_stock(settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {"dropout": 0.1, "layers": 6}
    clip: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    stock = fit("auto", seeded_module(**options), **clip, **settings)
    for memory in (small(options), "200MB"):
        ours = fit(OffmateStrategy(memory=memory), seeded_module(**options), **clip, **settings)
        assert differences(stock, ours) == []
        assert not ours.trainer.strategy.plan.delayed
    free = fit("auto", seeded_module(**options), **settings)
    assert differences(stock, free) != [], "there was nothing to clip"


def test_a_plan_that_updates_too_early_is_refused_before_training(tmp_path: Path) -> None:
    ours = fit(OffmateStrategy(memory="200MB"), max_epochs=1)
    path = ours.trainer.strategy.plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="before the norm of all gradients is known"):
        fit(OffmateStrategy(memory="200MB", plan=path), gradient_clip_val=1.0)
    clipped = fit(OffmateStrategy(memory="200MB"), max_epochs=1, gradient_clip_val=0.1)
    path = clipped.trainer.strategy.plan.save(tmp_path / "plan.json")
    replayed = fit(OffmateStrategy(memory="200MB", plan=path), gradient_clip_val=0.1)
    assert differences(fit("auto", gradient_clip_val=0.1), replayed) == []
