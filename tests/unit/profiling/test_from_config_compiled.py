"""Compiled blocks of a configuration: what they save is what inductor's code saves; what fuses is counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lt_offload import solve
from lt_offload.model.blocks import find_blocks
from lt_offload.profiling.from_config import load_model_config, profile_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.profile import BlockProfile, Profile
from tests.parity.engine.test_compiled import QUICKLY
from tests.support import models

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",  # Dynamo, of Bloom's function with a backward of its own
)


def estimated(config: PreTrainedConfig, *, compiled: bool = True, **options: Any) -> Profile:
    options = {"batch_size": 2, "sequence_length": 12, "hardware": "rtx-3060"} | options
    return profile_config(config, **options, compile_blocks=compiled)


def layer(found: Profile) -> BlockProfile:
    return next(block for block in found.blocks if block.kind == "layer")


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("bloom", "float32")])
def test_what_is_saved_is_what_compiled_code_saves(family: str, dtype: str) -> None:
    machine = replace(load_hardware("rtx-3060"), context_bytes=0)
    config = models.build(family).config
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
    for block in find_blocks(model).blocks:
        if block.kind == "layer":
            block.module.compile()
    with torch._inductor.config.patch(QUICKLY):
        expected = profile(
            model, models.batch(model, padding=True), optimizer=torch.optim.AdamW, device="cpu", hardware=machine
        )
    found = estimated(config, dtype=dtype, hardware=machine)
    for ours, theirs in zip(layer(found).options, layer(expected).options, strict=True):
        for name in ("name", "saved_bytes", "keeps_input", "offload_bytes"):
            assert getattr(ours, name) == getattr(theirs, name), (ours.name, name)
        # Where a kernel may write over what it reads, the code takes less.
        assert ours.forward_peak_bytes >= theirs.forward_peak_bytes
    assert not find_blocks(models.build(family)).blocks[1].module._compiled_call_impl


@pytest.mark.slow
def test_compiled_blocks_keep_less_and_are_faster() -> None:
    config = load_model_config("llama2-7b")
    config.num_hidden_layers = 2
    options: dict[str, Any] = {"batch_size": 4, "sequence_length": 512, "dtype": "bfloat16", "hardware": "rtx-4090"}
    plain, compiled = (estimated(config, compiled=on, **options) for on in (False, True))
    assert plain == estimated(config, compiled=False, **options)
    before, after = layer(plain).option("keep"), layer(compiled).option("keep")
    # Products, queries and keys that are turned, what attention returns: nothing of the norms or of the activation.
    assert after.saved_bytes + layer(compiled).input_bytes < 0.8 * before.saved_bytes
    assert after.forward_s < before.forward_s
    assert after.backward_s < before.backward_s
    assert [option.name for option in layer(compiled).options] == ["keep", "recompute", "reload", "offload", "discard"]
    assert [b for b in compiled.blocks if b.kind != "layer"] == [b for b in plain.blocks if b.kind != "layer"]
    assert solve(compiled, memory="8GB", solver_time_limit=2).predicted.iteration_s > 0
