"""Loops as people write them, each with the package and without: the same losses, weights and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.loops.bench import LOOPS, Bench, Here, in_both_ways, plain_steps

pytestmark = LOOPS


@in_both_ways
@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"dtype": torch.bfloat16}, {"lora": True}], ids=str)
def test_plain_steps(options: dict[str, Any], way: str, bench: Bench) -> None:
    assert bench.compare(way, plain_steps, **options) == []


@in_both_ways
def test_a_model_that_is_on_the_device_before(way: str, bench: Bench) -> None:
    assert bench.compare(way, plain_steps, before=True) == []


@in_both_ways
def test_accumulation_of_any_number(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(here.batches, start=1):
            loss = here.model(**batch).loss
            loss.backward()
            if number in (1, 4):
                here.step()
            losses.append(loss.detach().clone())
        return losses

    assert bench.compare(way, loop, delayed=True) == []


@in_both_ways
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_torchs_own_clipping(clip: str, way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses = []
        for batch in here.batches:
            loss = here.model(**batch).loss
            loss.backward()
            if clip == "norm":
                torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.1)
            else:
                torch.nn.utils.clip_grad_value_(here.model.parameters(), 1e-3)
            here.step()
            losses.append(loss.detach().clone())
        return losses

    assert bench.compare(way, loop, delayed=True) == []


@in_both_ways
@pytest.mark.parametrize("cached", [False, True])
def test_autocast(cached: bool, way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses = []
        for batch in here.batches:
            with torch.autocast(here.device.type, dtype=torch.bfloat16, cache_enabled=cached):
                loss = here.model(**batch).loss
            loss.backward()
            here.step()
            losses.append(loss.detach().clone())
        return losses

    assert bench.compare(way, loop) == []


@in_both_ways
def test_a_frozen_teacher_takes_the_fast_path_of_attention(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        teacher = torch.nn.Sequential(torch.nn.Embedding(1024, 64), layer).requires_grad_(False).eval().to(here.device)
        losses = []
        for batch in here.batches:
            with torch.no_grad():
                hidden = teacher(batch["input_ids"])
            loss = here.model(**batch).loss * hidden.square().mean()
            loss.backward()
            here.step()
            losses += [hidden, loss.detach().clone()]
        return losses

    assert bench.compare(way, loop) == []
