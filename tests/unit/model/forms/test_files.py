"""Files that hold weights in a storage form, or experts that are stored as they are read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.module import FineTune, LoraArgs
from lt_offload.model.forms import FORMS, open_weights
from lt_offload.model.forms.fp8 import FP8
from lt_offload.model.forms.mxfp4 import MXFP4
from tests.parity.models import quantized
from tests.support import models

LEFT_OPEN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def saved(family: str, folder: Path, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model: Any = quantized.experts(family, **settings).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def rewritten(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def as_gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Write the experts in ``folder`` as gpt-oss has them; return what they stand for."""
    tensors, opened = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name)
        closed = [MXFP4().close(matrix.t()) for matrix in weight]
        blocks, scales = (torch.stack(pieces) for pieces in zip(*closed, strict=True))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        shape = (weight.shape[2], weight.shape[1])
        opened[name] = torch.stack([MXFP4().open(pieces, shape, torch.bfloat16).t() for pieces in closed])
    rewritten(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_OPEN})
    return opened


def as_fp8(folder: Path) -> dict[str, Tensor]:
    """Write linear layers and each expert in ``folder`` as DeepSeek and Qwen do; return what they stand for."""
    tensors, opened = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors.pop(name)
        numbers, scales = FP8().close(weight)
        opened[name] = FP8().open((numbers, scales), weight.shape, torch.bfloat16)
        tensors[name] = numbers.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales.view(torch.float32).clone()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    rewritten(folder, tensors, settings)
    return opened


def built(folder: Path, form: Any) -> Any:
    return FineTune(str(folder), dtype="bfloat16", quantize=form, lora=LoraArgs(r=2)).build().base_model.model  # type: ignore[union-attr]


def test_gpt_oss_is_read_as_it_is_shipped(tmp_path: Path) -> None:
    plain, opened = saved("gpt_oss", tmp_path), as_gpt_oss(tmp_path)
    model = built(tmp_path, "mxfp4")
    batch = models.batch(model)
    logits = model(**batch).logits
    found = dict(open_weights(model).named_parameters())
    for name, weight in opened.items():
        at = name.replace(".gate_up_proj", ".base_layer.base_layer.gate_up_proj")
        assert torch.equal(found.get(at, found.get(name)), weight)  # type: ignore[arg-type]
    for name in ("model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.1.self_attn.sinks"):
        assert torch.equal(found[name], plain.get_parameter(name.replace("base_layer.", "")))
    assert torch.equal(model(**batch).logits, logits)
    with pytest.raises(ConfigError, match="stored as MXFP4; set model.quantize=mxfp4"):
        FineTune(str(tmp_path)).build()


def test_experts_are_read_as_qwen_ships_them_in_eight_bits(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path, moe_intermediate_size=128)
    opened = as_fp8(tmp_path)
    model = open_weights(load.load_model(str(tmp_path), dtype="bfloat16", as_stored=True, quantize="fp8"))
    experts = model.get_submodule("model.layers.1.mlp.experts")
    for number in range(5):
        of_file = [opened[f"model.layers.1.mlp.experts.{number}.{kind}_proj.weight"] for kind in ("gate", "up")]
        assert torch.equal(experts.gate_up_proj[number], torch.cat(of_file))  # type: ignore[index]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(name), opened[name])


def test_scales_of_experts_that_cannot_stand_one_above_the_other(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path, moe_intermediate_size=192)
    as_fp8(tmp_path)
    with pytest.raises(
        ConfigError, match=r"gate_up_proj: its 2 matrices per expert have 192 rows each .* the model that"
    ):
        load.load_model(str(tmp_path), dtype="bfloat16", as_stored=True, quantize="fp8")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_are_stored_as_they_are_read(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    for form in FORMS:
        expected = quantized.quantized(copy.deepcopy(model), torch.bfloat16, form).state_dict()  # type: ignore[arg-type]
        read = load.load_model(str(tmp_path), dtype="bfloat16", as_stored=True, quantize=form)  # type: ignore[arg-type]
        found = read.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("change", "message"), [("lose", "lack model.layers.0"), ("add", "beside what its config")])
def test_files_of_another_model(change: str, message: str, tmp_path: Path) -> None:
    saved("gpt_oss", tmp_path)
    as_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "lose":
        del tensors["model.layers.0.mlp.experts.down_proj_blocks"]
    else:
        tensors["model.layers.7.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        built(tmp_path, "mxfp4")
