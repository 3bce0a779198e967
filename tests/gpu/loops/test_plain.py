"""Loops as people write them, each with the package and without: the same losses, weights and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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


# -- between steps -----------------------------------------------------------------------------------------------------


def trained(here: Here, batch: dict[str, torch.Tensor], losses: list[torch.Tensor]) -> None:
    """One step, as always."""
    loss = here.model(**batch).loss
    loss.backward()
    here.step()
    losses.append(loss.detach().clone())


@in_both_ways
def test_averages_that_are_kept_on_the_device(way: str, bench: Bench) -> None:
    """As TRL's reference model is, and torch's own averages; there the weights' host copies meet tensors of a GPU."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        weights = list(here.model.parameters())
        one, other = ([torch.ones_like(weight, device=here.device) for weight in weights] for _ in range(2))
        for batch in here.batches:
            trained(here, batch, losses)
            for average, weight in zip(one, weights, strict=True):
                average.data.mul_(0.4).add_(weight.data, alpha=0.6)
            with torch.no_grad():
                torch._foreach_lerp_(other, weights, 0.1)
                here.seen[f"product {len(losses)}"] = other[-1] @ weights[-1].t()
        here.seen["averages"] = [average.cpu() for average in (*one, *other)]
        return losses

    weights = sum(weight.nbytes for weight in bench.fresh()[0].parameters())
    assert bench.compare(way, loop, beside=4 * weights) == []


@in_both_ways
def test_hooks_on_blocks(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        norms: list[torch.Tensor] = []

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            norms.append((output[0] if isinstance(output, tuple) else output).detach().float().abs().amax())

        def backward(module: nn.Module, inner: Any, outer: Any) -> None:
            norms.append(outer[0].detach().float().abs().amax())

        layers = here.model.get_submodule("model.layers")
        handles = [layers[1].register_forward_hook(forward), layers[2].register_full_backward_hook(backward)]  # type: ignore[index]
        losses: list[torch.Tensor] = []
        for batch in here.batches:
            trained(here, batch, losses)
        for handle in handles:
            handle.remove()
        trained(here, here.batches[0], losses)
        here.seen["norms"] = [norm.clone() for norm in norms]
        return losses

    assert bench.compare(way, loop) == []


# -- torch's GradScaler: of no use with bf16, but in many loops --------------------------------------------------------


@in_both_ways
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("finds_infinities", [False, True])
def test_a_grad_scaler(finds_infinities: bool, clip: bool, way: str, bench: Bench) -> None:
    """As in the examples of torch.amp; with infinities its second step is left out, by the optimizer's own code."""
    options = {} if finds_infinities else {"growth_interval": 2}
    after = [2.0**127, 2.0**10, 2.0**10, None] if finds_infinities else [None] * 4

    def loop(here: Here) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler(here.device.type, init_scale=2.0**10, **options)
        losses: list[torch.Tensor] = []
        scales: list[float] = []
        for batch, scale in zip(here.batches, after, strict=True):
            here.optimizer.zero_grad()
            with torch.autocast(here.device.type, dtype=torch.bfloat16, enabled=not finds_infinities):
                loss = here.model(**batch).loss
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(here.optimizer)
                if not finds_infinities:
                    here.clip_norm(0.1)
            scaler.step(here.optimizer)
            scaler.update(scale)
            losses.append(loss.detach().clone())
            scales.append(scaler.get_scale())
        here.seen["scales"] = scales
        return losses

    assert bench.compare(way, loop, delayed=True) == []
