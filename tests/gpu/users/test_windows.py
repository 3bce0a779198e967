"""Accumulation, clipping, batch sizes that are chosen, and batches in parts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from lt_offload.model import head
from lt_offload.strategy.first import survey
from tests.gpu.users.runs import MODEL, USERS, Bench, check_way, in_both_ways, module
from tests.parity.engine.test_head import CHUNK, use_reference
from tests.support.trainers import Run, Tokens, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]

CLIPS: dict[str, dict[str, Any]] = {
    "free": {},
    "by norm": {"gradient_clip_val": 0.1},
    "by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}


@in_both_ways
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("window", [2, 3])
def test_accumulation_with_a_short_last_window(window: int, clip: str, way: str, bench: Bench) -> None:
    """Three batches per epoch in windows of 2 and 1, seven rows in windows of 3, 3 and 1."""
    size = {} if window == 2 else {"batch_size": 1, "shuffle": False}

    def scene(strategy: Any) -> Run:
        limit = {} if window == 2 else {"limit_train_batches": 5}
        settings = {"accumulate_grad_batches": window, "max_epochs": 2} | limit | CLIPS[clip]
        return bench.fit(strategy, module(**size), **settings)

    expected, found = bench.compare(way, scene)
    assert differences(expected, found) == []
    assert found.trainer.global_step == 4
    assert found.trainer.strategy.plan.window == window


@in_both_ways
@pytest.mark.parametrize("window", [1, 2])
def test_batches_that_grow(window: int, way: str, bench: Bench) -> None:
    """The second micro-batch is too large for the first plan: it shows anew what to plan."""

    def grown(*rows: list[int]) -> Any:
        made = module(batch_size=1)
        made.train_dataloader = lambda: DataLoader(Tokens(made.model, 8, 0), batch_sampler=rows)
        return made

    def scene(strategy: Any) -> Run:
        made = grown([1], [0, 2, 3, 4, 5, 6], [7], [0, 1])
        return bench.fit(strategy, made, accumulate_grad_batches=window, max_epochs=1)

    def largest(strategy: Any) -> Run:
        return bench.fit(strategy, grown([0, 2, 3, 4, 5, 6]), accumulate_grad_batches=window, max_epochs=1)

    expected, found = bench.compare(way, scene, largest, share=0.1)
    assert differences(expected, found) == []
    shown = 1 if way == "resident" else 2
    assert found.trainer.strategy.profile.iterations[:2] == (1, 3 - window)[:shown]


@in_both_ways
def test_a_first_step_whose_logits_would_not_fit(way: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the loss with the last block, and so does the plan."""
    monkeypatch.setattr(survey, "_OF_LOGIT", 1 << 40)

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(), max_epochs=1)

    expected, found = bench.compare(way, scene)
    assert differences(expected, found) == []
    assert [option.name for option in found.trainer.strategy.profile.blocks[-1].options] == ["fused"]


@pytest.mark.parametrize("window", [1, 3])
def test_a_batch_size_that_is_chosen(window: int, bench: Bench) -> None:
    """The run is that of stock Lightning with the size, and the number of batches per update, that were chosen."""
    settings: dict[str, Any] = {"accumulate_grad_batches": window, "max_epochs": 1}
    made = module(shuffle=False)
    strategy = OffmateStrategy(memory="1GB", batch_size="auto", **bench.options)
    found = bench.fit(strategy, made, **settings)
    count = found.trainer.strategy.plan.accumulate
    assert strategy.plan is not None
    assert strategy.plan.batch_size == made.batch_size
    if window > 1:
        assert made.batch_size * count == 2 * window
    gc.collect()
    stock = module(shuffle=False, batch_size=made.batch_size)
    expected = bench.fit("auto", stock, **settings | {"accumulate_grad_batches": count})
    assert differences(expected, found) == []


@in_both_ways
def test_batches_in_parts_are_the_same_whatever_the_plan(way: str, bench: Bench) -> None:
    """Sums of parts have another order than stock's, the same in every plan; the emulated device shows which."""

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(), max_epochs=1)

    runs = []
    for one in ("resident", way):
        strategy = bench.strategy(one, scene, micro_batches=2)
        runs.append(scene(strategy))
        check_way(one, strategy)
        gc.collect()
    assert differences(*runs) == []
    assert torch.isfinite(runs[0].module.losses[-1])


@in_both_ways
def test_losses_in_chunks_from_the_first_step_on(way: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_LEAST_TOKENS", CHUNK)
    monkeypatch.setattr(head, "_PART_BYTES", CHUNK * 4 * MODEL["vocab_size"])
    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(), **settings)

    stock = module()
    use_reference(stock.model, CHUNK)
    expected = bench.fit("auto", stock, **settings)
    gc.collect()
    strategy = bench.strategy(way, scene, chunked_loss=True)
    found = scene(strategy)
    check_way(way, strategy)
    assert strategy.plan is not None
    assert strategy.plan.chunk_tokens == CHUNK
    for run in (expected, found):
        run.module.validation = [torch.zeros(())]  # there is none
    assert differences(expected, found) == []
