"""Checkpoints on the device: written and read by stock Lightning and by ours, at once and while training goes on."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.users.runs import USERS, Bench, check_way, in_both_ways, module, saver
from tests.support.trainers import BATCHES, Run, differences, state_differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]

DIRECTIONS = [("ours", "ours"), ("stock", "ours"), ("ours", "stock")]


def same_tensors(one: Any, other: Any, where: str = "") -> list[str]:
    """Name what differs in two checkpoints, which may hold tensors, numbers, lists and dictionaries."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        return [] if same else [where]
    if isinstance(one, dict):
        found = [] if one.keys() == other.keys() else [f"keys of {where}"]
        return found + [line for key in one.keys() & other.keys() for line in same_tensors(one[key], other[key], key)]
    if isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"length of {where}"]
        return found + [line for a, b in zip(one, other, strict=False) for line in same_tensors(a, b, where)]
    return [] if one == other else [where]


@in_both_ways
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(("first", "second"), DIRECTIONS)
def test_resumed_training_equals_one_run(
    first: str, second: str, later: bool, way: str, bench: Bench, tmp_path: Path
) -> None:
    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(shuffle=False))

    whole = scene("auto")

    def made(who: str) -> Any:
        gc.collect()
        return "auto" if who == "stock" else bench.strategy(way, scene, async_checkpoint=later)

    strategy = made(first)
    bench.fit(strategy, module(shuffle=False), max_epochs=1, **saver(tmp_path))
    if first == "ours":
        check_way(way, strategy)
    resumed = bench.fit(made(second), module(99, shuffle=False), ckpt=tmp_path / f"step={BATCHES}.ckpt")
    assert resumed.trainer.global_step == 2 * BATCHES
    assert len(resumed.module.losses) == BATCHES
    assert all(map(torch.equal, whole.module.losses[BATCHES:], resumed.module.losses))
    assert whole.module.lrs[BATCHES:] == resumed.module.lrs
    assert state_differences(whole, resumed) == []


@in_both_ways
def test_every_file_holds_what_stocks_holds(way: str, bench: Bench, tmp_path: Path) -> None:
    """Those for which training waits, and those that are written while it goes on."""

    def scene(strategy: Any, folder: str = "probe") -> Run:
        return bench.fit(strategy, **saver(tmp_path / folder))

    stock = scene("auto", "stock")
    for later in (False, True):
        gc.collect()
        strategy = bench.strategy(way, scene, async_checkpoint=later)
        folder = "later" if later else "now"
        assert differences(stock, scene(strategy, folder)) == []
        check_way(way, strategy)
        for step in range(1, 2 * BATCHES + 1):
            expected, found = (
                torch.load(tmp_path / name / f"step={step}.ckpt", map_location="cpu", weights_only=False)
                for name in ("stock", folder)
            )
            for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
                assert same_tensors(expected[key], found[key], key) == [], f"{folder}, step {step}"
