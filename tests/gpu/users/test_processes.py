"""Several runs in a process, models that were somewhere before, and streams of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.users.runs import USERS, Bench, in_both_ways, module
from tests.support.trainers import Run, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


@in_both_ways
def test_a_model_that_is_on_the_device_before(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module().to(bench.device))

    expected, found = bench.compare(way, scene, lambda strategy: bench.fit(strategy))
    assert differences(expected, found) == []


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
