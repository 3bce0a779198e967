"""Several runs in a process, models that were somewhere before, and streams of the user's."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lt_offload.errors import UnsupportedError
from tests.gpu.users.runs import USERS, Bench, in_both_ways, module
from tests.support.trainers import BATCHES, Run, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


@in_both_ways
def test_the_same_trainer_twice(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        run = bench.fit(strategy, max_epochs=1)
        run.trainer.fit_loop.max_epochs = 2
        return bench.fit(None, run.module, made=run.trainer)

    expected, found = bench.compare(way, scene)
    assert differences(expected, found) == []
    assert found.trainer.global_step == 2 * BATCHES


@in_both_ways
def test_runs_one_after_the_other(way: str, bench: Bench) -> None:
    """Of one model, and of another one, without a look at what the run before has left."""

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, max_epochs=1)

    stock = scene("auto")
    other = bench.fit("auto", module(99), max_epochs=1)
    both = bench.fit("auto", scene("auto").module, max_epochs=1)
    gc.collect()
    first, second, third = (bench.strategy(way, scene) for _ in range(3))
    run = scene(first)
    assert differences(stock, run) == []
    assert differences(other, bench.fit(second, module(99), max_epochs=1)) == []
    assert differences(both, bench.fit(third, run.module, max_epochs=1)) == []


@in_both_ways
def test_a_model_that_is_on_the_device_before(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module().to(bench.device))

    expected, found = bench.compare(way, scene, lambda strategy: bench.fit(strategy))
    assert differences(expected, found) == []


@in_both_ways
def test_a_run_within_a_stream(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        cuda = bench.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
            run = bench.fit(strategy, module(dropout=0.1))
        if cuda:
            torch.cuda.synchronize()
        return run

    assert differences(*bench.compare(way, scene)) == []


@pytest.mark.only("cuda", "fake")
@in_both_ways
def test_a_forward_on_a_stream_of_its_own_is_refused(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        made, side = module(), torch.cuda.Stream()
        step = made.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step(batch, batch_idx)
            torch.cuda.current_stream().wait_stream(side)
            return loss

        made.training_step = training_step
        return bench.fit(strategy, made)

    strategy = bench.strategy(way, lambda strategy: bench.fit(strategy))
    with pytest.raises(UnsupportedError, match="was called on another CUDA stream"):
        scene(strategy)
    gc.collect()
    expected = bench.fit("auto")
    gc.collect()
    assert differences(expected, bench.fit(bench.strategy(way, lambda strategy: bench.fit(strategy)))) == []


@in_both_ways
def test_a_stream_of_the_users_beside_the_step(way: str, bench: Bench) -> None:
    """Batches are prepared there, as prefetchers do."""

    def scene(strategy: Any) -> Run:
        made = module()
        if bench.device.type != "cuda":
            return bench.fit(strategy, made)
        side, step = torch.cuda.Stream(), made.training_step

        def training_step(batch: dict[str, Any], batch_idx: int) -> Any:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                shifted = {name: value.roll(1, dims=0) for name, value in batch.items()}
            main.wait_stream(side)
            for value in shifted.values():
                value.record_stream(main)
            return step(shifted, batch_idx)

        made.training_step = training_step
        return bench.fit(strategy, made)

    assert differences(*bench.compare(way, scene)) == []
