"""Adapters on stored weights, those of experts among them, and optimizers with states of eight bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lt_offload
from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import Plan
from tests.gpu.loops.bench import LOOPS, ROOM, Bench, Here, Loop, in_both_ways, plain_steps, same
from tests.parity.models import quantized
from tests.support import models
from tests.support.engines import Result, differences
from tests.support.plans import streamed
from tests.support.profiles import budgets
from tests.support.profiles.fixed_times import with_fixed_times

pytestmark = [*LOOPS, pytest.mark.only("cuda", "fake")]


SPARE = 1 << 18
"""Bytes beyond the least."""


class Quantized(Bench):
    """A model of four bits under adapters, with an optimizer of the test's choice."""

    def plan(self, way: str, switches: dict[str, Any] | None = None, **options: Any) -> Plan:
        """Updates that have other bits on the host are left to the device, or made in turns by both."""
        if options.get("eight_bits") == "anywhere":
            model, optimizer = self.fresh(**options)
            made = streamed(find_blocks(model), optimizer, options=["keep"], places=["host", "paged", "device"])
            return replace(made, budget_bytes=ROOM)
        only = {"host_update": False} if "eight_bits" in options else {}
        return super().plan(way, (switches or {}) | only, **options)

    def fresh(self, on_device: bool = False, eight_bits: str = "", **options: Any) -> tuple[nn.Module, Optimizer]:  # type: ignore[override]
        sizes: dict[str, Any] = {"layers": 4, "hidden_size": 256, "intermediate_size": 768}
        if "family" in options:
            sizes = {"num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 64}
        model = models.build(**sizes) if eight_bits else quantized.adapted(**sizes | options)
        model = model.to(self.device) if on_device else model
        trained = [p for p in model.parameters() if p.requires_grad]
        if eight_bits:
            eight: Any = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]
            return model, eight(trained, lr=1e-3, min_8bit_size=1024)
        return model, torch.optim.AdamW(trained, lr=1e-3, fused=True)


@pytest.fixture
def quantised(bench: Bench) -> Quantized:
    return Quantized(target=bench.target, plans={})


@in_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_on_four_bits(dtype: torch.dtype, way: str, quantised: Quantized) -> None:
    assert quantised.compare(way, plain_steps, dtype=dtype, lora_dropout=0.1) == []


@in_both_ways
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("qwen3_moe", "int8"), ("qwen3_moe", "fp8"), ("qwen3_moe", "mxfp4"), ("qwen3_moe", "lossless")),
        *(("gpt_oss", "mxfp4"), ("gpt_oss", "nf4"), ("olmoe", "lossless"), ("olmoe", "fp8")),
    ],
)
def test_adapters_of_experts_in_a_form(family: str, form: str, way: str, quantised: Quantized) -> None:
    targets = quantized.TARGETS
    assert quantised.compare(way, plain_steps, family=family, form=form, dtype=torch.bfloat16, targets=targets) == []


@in_both_ways
@pytest.mark.parametrize("form", ["int8", "fp8", "lossless", "mxfp4"])
def test_adapters_on_a_form(form: str, way: str, quantised: Quantized) -> None:
    assert quantised.compare(way, plain_steps, form=form, dtype=torch.bfloat16, lora_dropout=0.1) == []


@pytest.mark.parametrize("form", ["nf4", "int8", "fp8", "lossless", "mxfp4"])
@pytest.mark.parametrize("activation_offload", [True, False], ids=["offloaded", "recomputing"])
def test_experts_that_the_device_reads_in_host_memory(
    form: str, activation_offload: bool, quantised: Quantized
) -> None:
    options: dict[str, Any] = {"family": "qwen3_moe", "form": form, "dtype": torch.bfloat16, "num_experts": 64}
    options["num_hidden_layers"] = 2
    switches: dict[str, Any] = {"planner": "memferry", "activation_offload": activation_offload}
    # On a busy machine calls take so long that nothing else would decide.
    profile = with_fixed_times(quantised.profile(**options))
    plan = lt_offload.solve(profile, memory=budgets.least(profile, **switches) + SPARE, **switches)
    read = {profile.tensors[tensor].name for op in plan.ops for tensor in plan.zero_copy(op)}
    assert any(".experts." in name for name in read)
    expected, _ = quantised.plainly(plain_steps, **options)
    model, optimizer = quantised.fresh(**options)
    batches = quantised.batches()
    with lt_offload.offloaded(model, optimizer, batches[0], plan=plan, accelerator=quantised.target.accelerator) as run:
        torch.manual_seed(1)
        losses = plain_steps(
            Here(model=model, optimizer=optimizer, batches=batches, device=quantised.device, engine=run)
        )
    assert differences(expected, Result(losses, model, optimizer)) == []


def clipped_steps(here: Here) -> list[torch.Tensor]:
    """What a Trainer does: no update is made before the norm of all gradients is known."""
    losses = []
    for batch in here.batches[:2]:
        loss = here.model(**batch).loss
        loss.backward()
        here.clip_norm(1.0)
        here.step()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize(
    ("way", "loop"), [("tight", plain_steps), ("resident", plain_steps), ("resident", clipped_steps)]
)
def test_states_of_eight_bits(loop: Loop, way: str, quantised: Quantized) -> None:
    expected, _ = quantised.plainly(loop, eight_bits="device")
    found, _ = quantised.ours(way, loop, delayed=loop is clipped_steps, eight_bits="device")
    assert same(expected.losses, found.losses)
    assert same(expected.model.state_dict(), found.model.state_dict())
    states = [result.optimizer.state_dict()["state"] for result in (expected, found)]
    assert same(*states)
    weight = found.model.get_parameter("lm_head.weight")
    assert found.optimizer.state[weight]["state1"].dtype == torch.uint8


def test_states_of_eight_bits_on_host_and_device(quantised: Quantized) -> None:
    """Updates of both run at the same time; their tables are brought to where each is. The host's have other bits."""
    expected, _ = quantised.plainly(plain_steps, eight_bits="anywhere")
    found, _ = quantised.ours("tight", plain_steps, eight_bits="anywhere")
    places = quantised.plan("tight", {"accumulate": 1}, eight_bits="anywhere").update_places
    assert {"host"} < {place for place in places if place is not None}
    torch.testing.assert_close([loss.cpu() for loss in found.losses], expected.losses, rtol=1e-2, atol=0.0)
    for param in found.model.parameters():
        state = found.optimizer.state[param]
        held = [value for value in state.values() if isinstance(value, torch.Tensor)]
        assert {value.device.type for value in held} == {"cpu"}


def test_generation_from_four_bits(quantised: Quantized) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses = plain_steps(here)
        with torch.no_grad():
            generate: Any = here.model.generate
            here.seen["tokens"] = generate(input_ids=torch.arange(3, 9, device=here.device)[None], max_new_tokens=4)
        return losses

    assert quantised.compare("tight", loop) == []
