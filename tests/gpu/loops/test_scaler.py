"""Loops with torch's GradScaler: of no use with bf16, but in many."""

from __future__ import annotations

import pytest
import torch

from lt_offload.errors import UnsupportedError
from tests.gpu.loops.bench import LOOPS, Bench, Here, in_both_ways

pytestmark = LOOPS


@in_both_ways
@pytest.mark.parametrize("clip", [False, True])
def test_a_grad_scaler(clip: bool, way: str, bench: Bench) -> None:
    """As in the examples of torch.amp."""

    def loop(here: Here) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler(here.device.type, init_scale=1024.0, growth_interval=2)
        losses: list[torch.Tensor] = []
        scales: list[float] = []
        for batch in here.batches:
            here.optimizer.zero_grad()
            with torch.autocast(here.device.type, dtype=torch.bfloat16):
                loss = here.model(**batch).loss
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(here.optimizer)
                here.clip_norm(0.1)
            scaler.step(here.optimizer)
            scaler.update()
            losses.append(loss.detach().clone())
            scales.append(scaler.get_scale())
        here.seen["scales"] = scales
        return losses

    assert bench.compare(way, loop, delayed=True) == []


@in_both_ways
@pytest.mark.parametrize("clip", [False, True])
def test_a_grad_scaler_that_finds_infinities(clip: bool, way: str, bench: Bench) -> None:
    """The second step is left out: the optimizer's own code does that where it is told to."""

    def loop(here: Here) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler(here.device.type, init_scale=2.0**10)
        losses: list[torch.Tensor] = []
        scales: list[float] = []
        for batch in here.batches:
            here.optimizer.zero_grad()
            loss = here.model(**batch).loss
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(here.optimizer)
            scaler.step(here.optimizer)
            scaler.update([2.0**127, 2.0**10, 2.0**10, None][len(scales)])
            losses.append(loss.detach().clone())
            scales.append(scaler.get_scale())
        here.seen["scales"] = scales
        return losses

    assert bench.compare(way, loop, delayed=True) == []


@in_both_ways
def test_a_grad_scaler_is_refused_where_updates_do_not_wait(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler(here.device.type)
        loss = here.model(**here.batches[0]).loss
        scaler.scale(loss).backward()
        scaler.step(here.optimizer)
        return [loss]

    with pytest.raises(UnsupportedError, match="delayed=True"):
        bench.ours(way, loop)
