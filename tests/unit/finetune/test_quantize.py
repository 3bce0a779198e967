from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload import limits
from lt_offload.errors import ConfigError
from lt_offload.finetune import load, quantize
from lt_offload.finetune.module import FineTune, LoraArgs
from lt_offload.model import forms
from lt_offload.model.blocks import find_blocks
from lt_offload.model.forms import FORMS, open_weights
from lt_offload.model.forms.layer import StoredLinear, pieces_of, stored_of
from tests.parity.models import quantized
from tests.support import models, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), **quantized.SIZES)


def same_as(model: nn.Module, other: nn.Module) -> bool:
    left, right = model.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def built(folder: Path, **settings: Any) -> nn.Module:
    return FineTune(str(folder), quantize="nf4", lora=LoraArgs(r=2), **settings).build()


def stored_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, StoredLinear)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_compute_as_those_that_transformers_makes(folder: Path, dtype: Any) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    numbers = getattr(torch, dtype)
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=numbers
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=numbers, device_map="cpu")
    ours = quantize.quantized(load.load_model(str(folder), as_stored=True), numbers)
    assert len(stored_layers(ours)) == 14
    assert ours.lm_head.weight.dtype == ours.model.norm.weight.dtype == ours.config.dtype == numbers
    batch = models.batch(ours)
    assert torch.equal(ours.eval()(**batch).logits, theirs.train()(**batch).logits)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_lets_go_of_what_it_has_read(folder: Path, tmp_path: Path) -> None:
    """All weights of the files were in memory beside the result once: 1.3 times the model, not 0.3 times."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def pages_of_files() -> int:
        found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = load.load_model(str(tmp_path), as_stored=True)
    expected = torch.cat([parameter.detach().flatten() for parameter in stored.parameters()])  # reads all of it
    built(folder)  # loads libraries
    with_all = pages_of_files()
    model = quantize.quantized(stored, torch.bfloat16)
    assert pages_of_files() < with_all - 0.8 * expected.nbytes
    assert len(stored_layers(model)) == 28
    again = load.load_model(str(tmp_path), as_stored=True)
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in again.parameters()]), expected)


def test_adapters_are_trained_and_nothing_else(folder: Path) -> None:
    model = built(folder, dtype="bfloat16")
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    limits.check("model", limits.Setup(model=model))


def test_pieces_travel_and_nothing_stays() -> None:
    model = quantized.adapted()
    structure = find_blocks(model)
    names = [name for name, _ in structure.tensors]
    weights = [name for name in names if name.endswith("base_layer.weight")]
    assert len(weights) == 14
    for name in weights:
        at = names.index(name)
        assert names[at + 1 : at + 3] == [f"{name}_absmax", f"{name}_nested"]
    assert structure.rest == ()


def test_a_state_dict_has_all_pieces_and_a_cast_changes_none(folder: Path) -> None:
    model, other = built(folder), built(folder)
    batch = models.batch(model)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.view(torch.uint8).bitwise_xor_(1)
    assert not same_as(model, other)
    other.load_state_dict(model.state_dict())
    assert same_as(model, other)
    assert torch.equal(model(**batch).logits, other(**batch).logits)
    pieces = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    assert len(pieces) == 14 * 3
    cast = model.to(torch.bfloat16).state_dict()
    assert all(torch.equal(cast[name], tensor) for name, tensor in pieces.items())


def test_evaluation_leaves_the_weights_as_they_are(folder: Path) -> None:
    model = built(folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.eval()(**models.batch(model))
    assert same_as(model, other)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_stored_can_be_merged_with_adapters(form: str) -> None:
    model: Any = quantized.adapted(dtype=torch.bfloat16, form=form)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    base = stored_of(layer.base_layer)["weight"].open_all(pieces_of(layer.base_layer, "weight"))
    expected = base.float() + layer.get_delta_weight("default").float()
    batch = models.batch(model)
    with model.disable_adapter():
        before = model(**batch).logits
    open_weights(model)
    with model.disable_adapter():
        assert torch.equal(model(**batch).logits, before)
    merged = model.merge_and_unload()
    assert stored_layers(merged) == []
    found = merged.model.layers[0].self_attn.q_proj.weight
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


def test_a_merged_model_is_written_as_any_other(tmp_path: Path) -> None:
    merged: Any = open_weights(quantized.adapted(dtype=torch.bfloat16)).merge_and_unload()  # type: ignore[operator]
    merged.save_pretrained(tmp_path)
    assert same_as(load.load_model(str(tmp_path), dtype="bfloat16"), merged)


def test_a_model_stored_in_four_bits(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    stored = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, device_map="cpu")
    stored.save_pretrained(tmp_path)
    expected = dict(built(folder).named_parameters())
    for name, parameter in built(tmp_path).named_parameters():
        assert "lora_A" in name or torch.equal(parameter, expected[name])
    with pytest.raises(ConfigError, match="stored as NF4; set model.quantize=nf4"):
        FineTune(str(tmp_path)).build()
    with pytest.raises(ConfigError, match="stored as NF4; set model.quantize=nf4"):
        FineTune(str(tmp_path), quantize="int8", lora=LoraArgs(r=2)).build()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"stored in 8 bits \(load_in_8bit\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, r"bitsandbytes \(fp4\)"),
        ({"quant_method": "gptq", "bits": 4}, "stored in gptq"),
    ],
)
def test_models_stored_otherwise(stored: dict[str, Any], message: str) -> None:
    config = load.load_config("unused", "phi2")
    config.quantization_config = stored
    for setting in ("nf4", None):
        with pytest.raises(ConfigError, match=message):
            quantize.check_stored(config, setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"needs model\.lora"),
        ({"master_weights": True, "dtype": "bfloat16"}, r"needs model\.lora"),
        ({"lora": LoraArgs(), "master_weights": True, "dtype": "bfloat16"}, r"master_weights=true changes nothing"),
        ({"lora": LoraArgs(), "compile_blocks": True}, "compile_blocks=true is not offered"),
        ({"lora": LoraArgs(), "quantize": "int4"}, "'int4' is not known; use nf4, mxfp4, fp8, int8, lossless"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTune("unused", **{"quantize": "nf4"} | settings)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        FineTune("unused", quantize="nf4", lora=LoraArgs())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        quantize.quantized(models.build(), torch.float32)


def test_layers_that_are_no_linear_ones() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=97, n_positions=64))
    with pytest.raises(ConfigError, match=r"most weights of GPT2LMHeadModel are neither of an nn\.Linear .*Conv1D"):
        quantize.quantized(model, torch.float32)


def test_rows_that_are_no_whole_blocks_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    model = quantize.quantized(models.build(hidden_size=64, intermediate_size=80), torch.bfloat16, "mxfp4")
    assert {name.rpartition(".")[2] for name in stored_layers(model)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj"),
    }
    assert "3 weights with rows of no multiple of 32 numbers stay in bfloat16: model" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"most weights of LlamaForCausalLM .* a Linear, with rows of no multiple"):
        quantize.quantized(models.build(hidden_size=48, intermediate_size=80), torch.float32, "mxfp4")


def test_a_vision_tower_with_other_rows_is_stored_where_its_form_allows(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97, "head_dim": 16}
    vision = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3Config(text_config=text | heads, vision_config=vision, mm_tokens_per_image=4)
    model = quantize.quantized(Gemma3ForConditionalGeneration(config), torch.float32, "mxfp4")
    assert len(stored_layers(model)) == 2 * 7
    assert all("language_model" in name for name in stored_layers(model))
    assert "8 weights with rows of no multiple of 32 numbers stay in float32" in capsys.readouterr().err
    model = quantize.quantized(Gemma3ForConditionalGeneration(config), torch.float32)
    assert len(stored_layers(model)) == 2 * 7 + 8
