"""The first thing anybody tries: a Trainer with the strategy, with and without a budget, measured and planned here."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from lt_offload import OffmateStrategy
from tests.gpu.users.runs import USERS, Bench, check_way, module
from tests.support.trainers import Run, differences

pytestmark = USERS

FLAVOURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"dropout": 0.1}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "lora": ({"dropout": 0.1, "lora": True}, {}),
}
"""Options of the model, settings of the Trainer."""

LARGE = {"layers": 6, "hidden_size": 512, "intermediate_size": 1024}
"""60 MB of weights: what an allocator maps at once is little of a budget for that."""


@pytest.mark.parametrize("memory", [None, "2GB"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_first_run_equals_stock(flavour: str, memory: str | None, bench: Bench) -> None:
    options, settings = FLAVOURS[flavour]
    expected = bench.fit("auto", module(**options), **settings)
    gc.collect()
    found = bench.fit(OffmateStrategy(memory=memory, **bench.options), module(**options), **settings)
    assert differences(expected, found) == []
    assert found.trainer.strategy.trace.device_peak <= found.trainer.strategy.plan.budget_bytes


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_run_within_a_small_budget_equals_stock(flavour: str, bench: Bench) -> None:
    options, settings = FLAVOURS[flavour]

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(**LARGE | options), **settings)

    expected = scene("auto")
    gc.collect()
    memory = bench.tight(scene, **bench.options)
    strategy = OffmateStrategy(memory=memory, **bench.options)
    found = scene(strategy)
    check_way("tight", strategy)
    assert differences(expected, found) == []
    assert strategy.trace is not None
    assert strategy.trace.device_peak <= memory


def test_by_name(bench: Bench) -> None:
    assert differences(bench.fit("auto"), bench.fit("offmate")) == []


def test_weights_are_on_the_host_afterwards(bench: Bench) -> None:
    """Where stock Lightning leaves them, too."""
    for strategy in ("auto", OffmateStrategy(memory="2GB", **bench.options)):
        run = bench.fit(strategy, max_epochs=1)
        assert {p.device.type for p in run.module.parameters()} == {"cpu"}
        assert all(p.isfinite().all() for p in run.module.parameters())
