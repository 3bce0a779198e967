import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lt_offload
from lt_offload.errors import ConfigError, InfeasibleError, ModelError
from lt_offload.finetune.module import LoraArgs, add_lora
from lt_offload.profiling.flops import flops_per_token, product_flops_per_token
from lt_offload.profiling.from_config import load_model_config, profile_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.profile import Profile
from scripts.breadth.models import tiny
from tests import sampling
from tests.support import models

SIZES = (
    *("saved_bytes", "keeps_input", "offload_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "held_peak_bytes", "passing_peak_bytes"),
)
"""As the models' cards state them."""
FUSED = partial(torch.optim.AdamW, fused=True)
"""What configurations are planned with, if nothing is said."""


def real(model: nn.Module, batch: Any = None, *, padding: bool = True, autocast: str | None = None) -> Profile:
    """The profile of a model with weights, for the machine that :func:`fake` plans for."""

    def run(given: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None, cache_enabled=False):
            return model(**given).loss

    batch = models.batch(model, padding=padding) if batch is None else batch
    return profile(model, batch, optimizer=FUSED, device="cpu", hardware=load_hardware("rtx-3060"), run=run)


def fake(config: Any, **options: Any) -> Profile:
    return profile_config(config, **{"batch_size": 2, "sequence_length": 12, "hardware": "rtx-3060"} | options)


def test_what_a_token_costs_is_counted_as_palm_does() -> None:
    """6 N of what is in products, and attention; the rate is that of the dtype in which products are computed."""
    config = models.build("llama", tie_word_embeddings=False).config
    found = fake(config)
    table = config.vocab_size * config.hidden_size
    weights = sum(math.prod(t.shape) for t in found.tensors if len(t.shape) > 1) - table
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 12
    assert found.flops_per_token == 6 * weights + attention
    peaks = load_hardware("rtx-3060").peak_flops_per_s
    assert found.peak_flops_per_s == peaks["float32"] > load_hardware("rtx-3060").flops_per_s["float32"]
    assert fake(config, autocast="bfloat16").peak_flops_per_s == peaks["bfloat16"]
    plan = lt_offload.solve(found, memory="2GB")
    assert plan.peak_share == pytest.approx(plan.tokens_per_s * found.flops_per_token / peaks["float32"])
    assert flops_per_token(models.build("mixtral"), 12) is None
    staged = nn.Linear(3, 4)
    staged.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=[3, 6], hidden_size=8)
    assert flops_per_token(staged, 12) == product_flops_per_token(staged)


@pytest.mark.slow
def test_dtypes_and_optimizers_are_taken_as_pytorch_has_them_and_by_name() -> None:
    model = models.build("llama")
    by_name = fake(model.config, dtype="bfloat16", autocast="float16", host_memory="40GB")
    assert fake(model.config, dtype=torch.bfloat16, autocast=torch.float16, host_memory=40 * 10**9) == by_name
    arguments: dict[str, Any] = {"device": "cpu", "hardware": load_hardware("rtx-3060")}
    expected = real(model).tensors
    for optimizer in ("AdamW", FUSED, FUSED(model.parameters())):
        found = profile(model, models.batch(model), optimizer=optimizer, **arguments)
        assert found.optimizer.name == "AdamW"
        assert found.tensors == expected


def layers_of_smollm2() -> Any:
    """The configuration of a model large enough for a processor's speed to count, with few layers."""
    config = load_model_config("smollm2-135m")
    config.num_hidden_layers = 2
    return config


def assert_same_bytes(found: Profile, expected: Profile) -> None:
    assert [t.shape for t in found.tensors] == [t.shape for t in expected.tensors]
    assert found.tensors == expected.tensors
    assert found.fingerprint == expected.fingerprint
    assert found.shared_bytes == expected.shared_bytes
    for ours, theirs in zip(found.blocks, expected.blocks, strict=True):
        for name in ("name", "kind", "input_bytes", "output_bytes", "has_backward"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert [o.name for o in ours.options] == [o.name for o in theirs.options]
        for a, b in zip(ours.options, theirs.options, strict=True):
            assert {name: getattr(a, name) for name in SIZES} == {name: getattr(b, name) for name in SIZES}, ours.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in models.FAMILIES),
        ("llama-tied", {"autocast": "bfloat16"}),
        ("bloom", {"autocast": "bfloat16"}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}),
        ("llama", {"tile_tokens": 5}),
        (
            "bloom",
            {"tile_tokens": 5, "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "dense"]}},
        ),
    ],
)
def test_bytes_without_weights_equal_those_with_weights(family: str, options: dict[str, Any]) -> None:
    config = models.build(family, dropout=0.1 if "dtype" in options else 0.0).config
    model = models.build(family, lora="lora" in options)
    if "dtype" in options:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options["dtype"])).train()
    lt_offload.tile_tokens(model, options.get("tile_tokens"))
    found = fake(config, **options)
    assert found.tile_tokens == options.get("tile_tokens", 0)
    assert_same_bytes(found, real(model, autocast=options.get("autocast")))
    assert found.estimated
    assert all(o.forward_s > 0 for block in found.blocks for o in block.options)
    assert all((o.backward_s > 0) == block.has_backward for block in found.blocks for o in block.options)
    assert all(block.launch_s > 0 for block in found.blocks)


@pytest.mark.parametrize("parts", [1, 2])
def test_as_much_is_run_for_many_like_layers_as_for_few(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[nn.Module]()
    forward = LlamaDecoderLayer.forward
    monkeypatch.setattr(
        LlamaDecoderLayer, "forward", lambda layer, *a, **k: runs.append(layer) or forward(layer, *a, **k)
    )
    counts = []
    for layers in (2, 12):
        config = models.build("llama").config
        config.num_hidden_layers = layers
        profiled = fake(config, micro_batches=parts)
        counts.append(len(runs))
        runs.clear()
        places = [at for at, block in enumerate(profiled.blocks) if block.kind == "layer"]
        reads = [[tensor.zero_copy for tensor in profiled.tensors if at in tensor.blocks] for at in places]
        assert len(reads) == layers
        assert None not in reads[0]
        assert all(of_block == reads[0] for of_block in reads)
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bytes_of_packed_batches_equal_those_with_weights(attention: str) -> None:
    """A mask of all pairs of tokens for every sequence, and positions of its own for each."""
    config = load_model_config("smollm2-135m")
    config.update({"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2})
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    batch = models.batch(model, padding=False)
    batch["position_ids"] = (torch.arange(12) % 6).repeat(2, 1)
    found = fake(config, packing=True, padding=False)
    assert_same_bytes(found, real(model, batch))
    rows = batch["input_ids"].numel() * batch["input_ids"].element_size()
    assert found.shared_bytes >= fake(config, padding=False).shared_bytes + rows


@pytest.mark.parametrize("family", sampling.some(models.FAMILIES, 3))
def test_without_padding_no_mask_is_counted(family: str) -> None:
    """Whether a mask can be left out depends on numbers, which fake tensors do not have."""
    model = models.build(family)
    assert_same_bytes(fake(model.config, padding=False), real(model, padding=False))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "autocast"), [("float32", None), ("float32", "bfloat16"), ("bfloat16", None)])
def test_bytes_of_mixtures_of_experts_equal_those_with_weights(family: str, dtype: str, autocast: str | None) -> None:
    """Their experts are multiplied together, in any dtype."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": models.VOCAB}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, **experts, use_cache=False, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
    assert model.config._experts_implementation == "grouped_mm"
    assert_same_bytes(fake(config, dtype=dtype, autocast=autocast), real(model, autocast=autocast))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor"])
def test_too_little_ram_is_said_before_the_model_is_run_as_plans_say_it(optimizer: str) -> None:
    options: dict[str, Any] = {"batch_size": 2, "sequence_length": 16, "hardware": "rtx-3060", "optimizer": optimizer}
    measured = profile_config("smollm2-135m", dtype="bfloat16", **options)
    with pytest.raises(InfeasibleError) as planned:
        lt_offload.solve(measured, host_memory="2100MB")
    with pytest.raises(InfeasibleError, match="host_memory=2.1 GB is too small for the host copies") as early:
        profile_config("smollm2-135m", dtype="bfloat16", host_memory=2_100_000_000, **options)
    needed = early.value.needed_host_bytes
    assert needed == planned.value.needed_host_bytes
    assert profile_config("smollm2-135m", dtype="bfloat16", host_memory=needed, **options) == measured


@pytest.mark.slow
def test_a_large_model_needs_little_memory() -> None:
    program = (
        "from lt_offload.profiling.from_config import profile_config\n"
        "found = profile_config('llama2-7b', batch_size=4, sequence_length=512, hardware='rtx-3060', optimizer='sgd')\n"
        "layers = [b for b in found.blocks if b.kind == 'layer']\n"
        "keep = layers[0].option('keep')\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
        "print(peak, len(layers), keep.saved_bytes)\n"
        "print(sum(b.option('keep').forward_s + b.option('keep').backward_s for b in found.blocks))\n"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    rss, layers, saved, seconds = out.stdout.split()
    assert int(rss) * 1024 < 1.5e9
    assert int(layers) == 32
    tokens, hidden, inner, heads, mask = 4 * 512, 4096, 11008, 32, 4 * 512 * 512
    assert int(saved) == 4 * (tokens * (9 * hidden + 4 * inner + heads + 2) + mask)
    # OFFMATE (2024), Table 2: 13.5 s with 13.7 % overhead, of which 27 GB at 16.6 GB/s are the update
    assert float(seconds) == pytest.approx(13.5 / 1.137 - 26.95 / 16.6, rel=0.02)


@pytest.mark.parametrize(
    ("optimizer", "ratio"), [("adamw", 2.0), ("Adam", 2.0), ("sgd", 1.0), (torch.optim.SGD, 0.0), ("adafactor", None)]
)
def test_optimizers(optimizer: Any, ratio: float | None) -> None:
    found = fake(layers_of_smollm2(), optimizer=optimizer)
    embedding = found.tensors[0]
    expected = ratio * embedding.bytes if ratio is not None else 4 * sum(embedding.shape)
    assert embedding.state_bytes == expected
    assert found.optimizer.device_bytes_per_s > found.optimizer.host_bytes_per_s > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hardware": "v100", "dtype": "bfloat16"},
            "dtype='bfloat16': v100-16gb has figures for float32, float16 only",
        ),
        ({"hardware": "rtx-9999"}, "hardware='rtx-9999' is no file and not known"),
        ({"sequence_length": 100_000}, "sequence_length=100000 is longer than the model's 8192 positions"),
        ({"optimizer": "lion"}, "optimizer='lion' is not known by name; known are adamw, adamw8bit, adam, sgd"),
        ({"config": "gpt-17"}, "config='gpt-17' is no file.*smollm2-135m"),
        ({"quantize": "nf4"}, "needs lora"),
        ({"quantize": "int4", "lora": {"r": 8}}, "use nf4, mxfp4, fp8, int8, lossless"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    config = options.pop("config", "smollm2-135m")
    with pytest.raises(ConfigError, match=message):
        fake(config, **options)


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    for text in ("[", '{"model_type": "no-such-model"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a Hugging Face model configuration"):
            fake(tmp_path)


def test_a_gpu_needs_page_tables_and_slack_and_an_emulated_device_neither() -> None:
    """Both are for what a driver does: of 512 bytes of host memory that are locked, one more on the device."""
    model = models.build()
    found = fake(model.config)
    host = sum(t.bytes + max(t.bytes, t.state_bytes) for t in found.tensors)
    assert host / 512 <= found.page_table_bytes < host / 512 + len(found.tensors)
    assert found.slack_share == 0.02
    emulated = profile(model, models.batch(model), optimizer=torch.optim.AdamW, device="cpu")
    assert (emulated.page_table_bytes, emulated.slack_share) == (0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_of_four_bits_without_weights_is_as_with_them(dtype: str) -> None:
    from tests.parity.models import quantized

    model = quantized.base(dtype=getattr(torch, dtype))
    args = LoraArgs(r=4, alpha=8)
    config, expected = model.config, real(add_lora(model, args))
    found = fake(config, lora=args.peft(), quantize="nf4", dtype=dtype)
    assert_same_bytes(found, expected)
    assert found.dtype == expected.dtype == dtype


def without_reads(profile: Profile, tensors: list[int]) -> Profile:
    """``profile`` without the costs of reading ``tensors`` in host memory."""
    kept = [replace(t, zero_copy=None) if index in tensors else t for index, t in enumerate(profile.tensors)]
    return replace(profile, tensors=tuple(kept))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "nf4")])
def test_stored_experts_without_weights_are_as_with_them(family: str, form: str) -> None:
    """Each is opened once per pass, of which one is counted for all."""
    from tests.parity.models import quantized

    model = quantized.base(family=family, form=form)
    args = LoraArgs(r=4, alpha=8, target_modules=["q_proj"], target_parameters=quantized.TARGETS)
    config, expected = model.config, real(add_lora(model, args))
    found = fake(config, lora=args.peft(), quantize=form)
    pieces = [index for index, tensor in enumerate(expected.tensors) if ".experts." in tensor.name and tensor.zero_copy]
    assert pieces
    for index in pieces:  # which experts a batch needs is not known without numbers
        (ours,), (theirs,) = (of.tensors[index].zero_copy.reads for of in (found, expected))
        experts, choices = expected.tensors[index].shape[0], 2 * 12 * config.num_experts_per_tok
        assert ours.forward_bytes == ours.backward_bytes
        assert ours.forward_bytes == round((1 - (1 - 1 / experts) ** choices) * expected.tensors[index].bytes)
        assert theirs.forward_bytes == theirs.backward_bytes <= expected.tensors[index].bytes
    assert_same_bytes(*(without_reads(of, pieces) for of in (found, expected)))
    once = fake(config, lora=args.peft(), quantize=form, batch_size=4)
    assert found.blocks[1].option("keep").forward_s < once.blocks[1].option("keep").forward_s
    assert found.blocks[1].launch_s == once.blocks[1].launch_s


def test_a_model_that_asks_for_numbers_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"aten\..* asks for numbers.*is planned only with its weights"):
        profile_config(tiny("jetmoe"), batch_size=2, sequence_length=12, hardware="rtx-3060-12gb")


def test_a_model_without_positions_takes_any_length() -> None:
    made = profile_config(tiny("xlnet"), batch_size=2, sequence_length=12, hardware="rtx-3060-12gb")
    assert made.sequence_length == 12
