"""Tiny models with stored weights under adapters, and one with layers of bitsandbytes' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lt_offload.finetune.module import LoraArgs, add_lora
from lt_offload.finetune.quantize import quantized
from tests.support import models

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Rows of whole blocks."""

_COMMON: dict[str, Any] = {"vocab_size": models.VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4}
_COMMON |= {"hidden_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2}
_COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "intermediate_size": 96}
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "qwen3_moe": {"num_experts": 5, "head_dim": 16, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "clip_qkv": None},
}
EXPERTS["gpt_oss"] |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def experts(family: str, **settings: Any) -> nn.Module:
    """Return a mixture of experts, with biases that are not 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(AutoConfig.for_model(family, **_COMMON | EXPERTS[family] | settings))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, std=0.1)
    return model.train()


_IMAGE = 90
"""The token of an image's parts; three from here on are no word."""


def gemma3_vision() -> nn.Module:
    """Return a Gemma 3 that sees images, whose tower has rows of 24 numbers: no whole blocks of MXFP4."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    text = {"vocab_size": models.VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 64, "use_cache": False}
    tower = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=SIZES | heads | text,
        vision_config=tower | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **dict(zip(("image_token_id", "boi_token_id", "eoi_token_id"), range(_IMAGE, _IMAGE + 3), strict=True)),
    )
    model: nn.Module = Gemma3ForConditionalGeneration(config)
    return model.train()


def with_images(batch: dict[str, torch.Tensor], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Return ``batch`` for :func:`gemma3_vision`, with an image in each row."""
    ids = batch["input_ids"].clamp(max=_IMAGE - 1)
    ids[:, 2:6] = _IMAGE
    pixels = torch.randn(len(ids), 3, 28, 28, generator=torch.Generator().manual_seed(seed)).to(dtype)
    seen = {"pixel_values": pixels, "token_type_ids": (ids == _IMAGE).long()}
    return {"input_ids": ids, "labels": ids.masked_fill(ids == _IMAGE, -100), **seen}


def base(*, dtype: torch.dtype = torch.float32, family: str = "llama", form: Any = "nf4", **settings: Any) -> nn.Module:
    """Return a model with stored weights in training mode, in which all but the layers are trained."""
    torch.manual_seed(0)
    if family in EXPERTS:
        return quantized(experts(family, **settings), dtype, form)
    if family == "gemma3_vision":
        return quantized(gemma3_vision(), dtype, form)
    sizes = SIZES if family != "bloom" else {"hidden_size": 64}
    return quantized(models.build(family, **{"layers": 2} | sizes | settings), dtype, form)


def of_bitsandbytes(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with layers as transformers loads them with a ``BitsAndBytesConfig``."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model: Any = models.build(layers=2, dtype=dtype, **SIZES)
    for name, layer in [*model.model.named_modules()]:
        if isinstance(layer, nn.Linear):
            with torch.device("meta"):
                new = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, False, compute_dtype=dtype, quant_type="nf4"
                )
            weight = bnb.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4", module=new)
            new.weight = weight.to("cpu")
            new.quant_state = new.weight.quant_state
            model.model.set_submodule(name, new)
    model.is_loaded_in_4bit = True
    return model  # type: ignore[no-any-return]


def adapted(
    *, lora_dropout: float = 0.0, targets: list[str] | None = None, loaded: bool = False, **settings: Any
) -> nn.Module:
    """Return :func:`base` with adapters that change something from the start; ``loaded``: :func:`of_bitsandbytes`."""
    model = of_bitsandbytes(**settings) if loaded else base(**settings)
    torch.manual_seed(1)
    model = add_lora(model, LoraArgs(r=4, alpha=8, dropout=lora_dropout, target_parameters=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero otherwise, and lora_A would have no gradient
            nn.init.normal_(parameter, std=0.02)
    return model
