"""A frozen base in a storage form under adapters: QLoRA (Dettmers et al., 2023) with NF4, or with another form.

The weights of linear layers and of experts are stored (``lt_offload/model/forms``), and opened to the dtype of the
model where they compute. Embeddings, norms, biases and the output projection stay in that dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lt_offload.compat.hugging_face import STORED_IN_EIGHT_BITS, STORED_IN_FOUR_BITS, forget_quantization
from lt_offload.errors import ConfigError
from lt_offload.finetune.processes import is_first
from lt_offload.finetune.terminal import say
from lt_offload.machine.pages import forget
from lt_offload.model.forms import FORMS, check_weights, close_weights, form_named, put_weight
from lt_offload.model.forms.layer import Stored
from lt_offload.model.forms.nf4 import NF4, check_scales
from lt_offload.model.quantized import packed_layers
from lt_offload.units import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Quantize = Literal["nf4", "mxfp4", "fp8", "int8", "lossless"]


def check_quantize(quantize: str | None, *, lora: object, compiled: bool = False, dtype: str = "bfloat16") -> None:
    """Refuse settings with which a stored base cannot be trained; raises ``ConfigError`` naming the setting."""
    if quantize is None:
        return
    if quantize not in FORMS:
        raise ConfigError(f"model.quantize={quantize!r} is not known; use {', '.join(FORMS)}, or set it to null")
    if lora is None:
        raise ConfigError(
            f"model.quantize={quantize} needs model.lora or model.adapter, as stored weights are never trained: set "
            "model.lora.r=8, or model.quantize=null"
        )
    if quantize == "lossless" and dtype != "bfloat16":
        raise ConfigError(
            f"model.quantize=lossless is for weights of bfloat16, and model.dtype={dtype}; set that to bfloat16, or "
            "model.quantize=null"
        )
    if compiled:
        raise ConfigError(
            f"model.compile_blocks=true is not offered with model.quantize={quantize}, whose products are no code that "
            "torch.compile sees; set one of them back"
        )
    form_named(quantize, "model.quantize")


def check_stored(config: PreTrainedConfig, quantize: Quantize | None) -> None:
    """Raise ``ConfigError`` for weights that are stored quantized, unless it is in the form that the settings name."""
    stored = stored_form(config)
    if stored is not None and quantize != stored:
        raise ConfigError(
            f"the model is stored as {stored.upper()}; set model.quantize={stored}, beside model.lora.r=8, or give the "
            "model that it was made of"
        )


def stored_form(config: PreTrainedConfig) -> Quantize | None:
    """Return the form in which the weights of a model are stored, None if it is none.

    Raises:
        ConfigError: if it is a form that is not offered.
    """
    stored: Any = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    method = settings.get("quant_method")
    four_bits = method == "bitsandbytes" and (settings.get("load_in_4bit") or settings.get(STORED_IN_FOUR_BITS))
    if four_bits and settings.get("bnb_4bit_quant_type") == "nf4":
        return "nf4"
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8" and list(settings.get("weight_block_size") or ()) == [128, 128]:
        return "fp8"
    if settings.get("load_in_8bit") or settings.get(STORED_IN_EIGHT_BITS):
        kind = "8 bits (load_in_8bit)"
    else:
        kind = str(method or "a quantized form")
        kind += f" ({settings['bnb_4bit_quant_type']})" if "bnb_4bit_quant_type" in settings else ""
    raise ConfigError(
        f"the model is stored in {kind}, which is not offered; give the model that it was made of, with "
        "model.quantize=nf4 where it shall take 4 bits"
    )


def quantized(model: nn.Module, dtype: torch.dtype, quantize: Quantize = "nf4") -> nn.Module:
    """Let ``model`` have its layers in a storage form, and all else in ``dtype``, in which it then computes; return it.

    One weight at a time: a model whose weights are mapped from files needs room for the result and one weight more, as
    pages that were read are dropped. A GPU does the work, if there is one; the result is on the host. Matrices that the
    form cannot take stay as they are, which is said. Raises ``ConfigError`` if they are most.
    """
    form = form_named(quantize, "model.quantize")
    _take_over(model, dtype)
    checked = check_weights(model, form, dtype)
    if checked.refused and is_first():
        name, why = next(iter(checked.refused.items()))
        kind = dtype_name(dtype)
        say(f"{len(checked.refused)} weights with {why} stay in {kind}: {name}, ...")
    forget_quantization(model)
    for _ in close_weights(model, form, checked, dtype=dtype, release=forget):
        pass
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if hasattr(model, "config"):
        model.config.dtype = dtype
    return model


def _take_over(model: Any, dtype: torch.dtype) -> None:
    """Make stored layers of those that transformers has loaded as bitsandbytes' layers of four bits."""
    loaded: Any
    for name, loaded in list(packed_layers(model)):
        state = loaded.weight.quant_state
        form = NF4(block=state.blocksize, scales=state.state2.blocksize if state.nested else 0)
        check_scales(state)
        stored = Stored(form, tuple(state.shape), dtype)
        with torch.device("meta"):
            layer = nn.Linear(loaded.in_features, loaded.out_features, bias=False).train(loaded.training)
        layer.bias = loaded.bias
        model.set_submodule(name, layer)
        put_weight(model, f"{name}.weight", stored, form.pieces(loaded.weight.data, state))
