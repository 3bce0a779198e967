"""A frozen base of four bits under adapters: QLoRA (Dettmers et al., 2023), with the layers of bitsandbytes.

Every ``nn.Linear`` but the output projection becomes a ``bitsandbytes.nn.Linear4bit``: NF4 in blocks of 64 numbers, the
scales quantized, too (4.127 bits a number in all). It computes with weights that are unpacked to the dtype of the
model. Embeddings, norms and the output projection stay in that dtype.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lt_offload.compat.hugging_face import STORED_IN_EIGHT_BITS, STORED_IN_FOUR_BITS
from lt_offload.errors import ConfigError
from lt_offload.finetune.processes import is_first
from lt_offload.finetune.terminal import say
from lt_offload.machine.pages import forget
from lt_offload.model.quantized import (
    BLOCK,
    bitsandbytes,
    check_layers,
    empty_layer,
    is_packed,
    packed_layers,
    prepare,
    uneven_layers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Quantize = Literal["nf4"]

_TRACES = {"is_loaded_in_4bit", "is_quantized", "quantization_method", "hf_quantizer"}
"""Attributes by which transformers and peft tell a model of four bits, and refuse to write it as another."""


def check_quantize(quantize: Quantize | None, *, lora: object, compiled: bool = False) -> None:
    """Refuse settings with which a base of four bits cannot be trained; raises ``ConfigError`` naming the setting."""
    if quantize is None:
        return
    if quantize != "nf4":
        raise ConfigError(f"model.quantize={quantize!r} is not known; use nf4, or set it to null")
    if lora is None:
        raise ConfigError(
            "model.quantize=nf4 needs model.lora or model.adapter, as weights of four bits are never trained: set "
            "model.lora.r=8, or model.quantize=null"
        )
    if compiled:
        raise ConfigError(
            "model.compile_blocks=true is not offered with model.quantize=nf4, whose products are no code that "
            "torch.compile sees; set one of them back"
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError("model.quantize=nf4 needs the package bitsandbytes: pip install bitsandbytes")


def check_stored(config: PreTrainedConfig, quantize: Quantize | None) -> None:
    """Raise ``ConfigError`` for weights that are stored quantized, unless it is as NF4 and the settings say so."""
    stored: Any = getattr(config, "quantization_config", None)
    if stored is None:
        return
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    four_bits = settings.get("quant_method") == "bitsandbytes" and (
        settings.get("load_in_4bit") or settings.get(STORED_IN_FOUR_BITS)
    )
    if four_bits and settings.get("bnb_4bit_quant_type") == "nf4":
        if quantize is None:
            raise ConfigError("the model is stored in 4 bits (NF4); set model.quantize=nf4 and model.lora.r=8")
        return
    if settings.get("load_in_8bit") or settings.get(STORED_IN_EIGHT_BITS):
        kind = "8 bits (load_in_8bit)"
    else:
        kind = str(settings.get("quant_method") or "a quantized form")
        kind += f" ({settings['bnb_4bit_quant_type']})" if "bnb_4bit_quant_type" in settings else ""
    raise ConfigError(
        f"the model is stored in {kind}, which is not offered; give the model that it was made of, with "
        "model.quantize=nf4 where it shall take 4 bits"
    )


def quantized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let ``model`` have its layers in four bits, and all else in ``dtype``, in which it then computes; return it.

    One layer at a time: a model whose weights are mapped from files needs room for the result and one weight more, as
    pages that were read are dropped. A GPU does the work, if there is one; the result is on the host. Layers of four
    bits stay as they are, and those whose rows are no multiple of a block. Raises ``ConfigError`` if most weights are
    in such layers, or in none.
    """
    bnb = bitsandbytes()
    worker = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any
    for _, loaded in packed_layers(model):  # they were stored in four bits
        loaded.compute_dtype, loaded.compute_type_is_set = dtype, True
        loaded.weight.quant_state.dtype = dtype
        loaded.register_load_state_dict_pre_hook(_load_scales)
        if loaded.bias is not None:
            loaded.bias.data = loaded.bias.data.to(dtype)
    layers, uneven = check_layers(model), [name for name, _ in uneven_layers(model)]
    if uneven and is_first():
        kind = str(dtype).removeprefix("torch.")
        say(f"{len(uneven)} layers with rows of no multiple of {BLOCK} numbers stay in {kind}: {uneven[0]}, ...")
    while layers:
        name, layer = layers.pop()  # the list would keep what the model lets go of
        new = empty_layer(layer, dtype)
        weight = layer.weight.detach().to(dtype).to(worker)
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", blocksize=BLOCK, module=new)
        # bitsandbytes quantizes when a parameter moves to a device, be it the one where it is.
        new.weight = new.weight.to(worker).to("cpu")
        new.quant_state = new.weight.quant_state
        forget(layer.weight.detach())
        if layer.bias is not None:
            new.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        new.train(layer.training)
        new.register_load_state_dict_pre_hook(_load_scales)
        model.set_submodule(name, new)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_packed(parameter):
            parameter.data = parameter.data.to(dtype)
    if hasattr(model, "config"):
        model.config.dtype = dtype
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    prepare(model)
    return model


def dequantized(model: nn.Module) -> nn.Module:
    """Replace the layers of four bits in ``model`` by ordinary ones with the unpacked numbers; return it.

    The result is the base that training has computed with, not the one that was loaded: the digits that rounding to
    four bits took are gone.
    Adapters stay, and can be merged as those of any model. In the end the weights take four times the room.
    """
    bnb = bitsandbytes()
    adapted = [module for module in model.modules() if type(module).__module__ == "peft.tuners.lora.bnb"]
    for name, module in list(packed_layers(model)):
        with torch.device("meta"):
            new = nn.Linear(module.in_features, module.out_features, module.bias is not None)
        numbers: Tensor = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        new.weight = nn.Parameter(numbers.to(module.compute_dtype), requires_grad=False)
        new.bias = module.bias
        model.set_submodule(name, new.train(module.training))
    for module in adapted:  # their own merge would round the sum to four bits
        from peft.tuners.lora import layer

        # peft has a class of adapters for each kind of layer. The layer inside is an ordinary one by now; so the
        # class becomes that of ordinary layers, with two attributes that its constructor would have set.
        vars(module).update(fan_in_fan_out=False, is_target_conv_1d_layer=False)
        module.__class__ = layer.Linear
    for module in model.modules():
        for attribute in _TRACES & vars(module).keys():
            delattr(module, attribute)
        if hasattr(getattr(module, "config", None), "quantization_config"):
            del module.config.quantization_config  # type: ignore[union-attr]
    return model


def _load_scales(
    module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
) -> None:
    """Load a layer's scales and take them out of the state dictionary, where torch would refuse unknown keys."""
    begin = f"{prefix}weight."
    scales = {key.removeprefix(begin): state_dict.pop(key) for key in list(state_dict) if key.startswith(begin)}
    if not scales:
        return
    mine: Any = module.weight.quant_state
    saved = type(mine).from_dict(scales, device=torch.device("cpu"))
    same = (mine.shape, mine.blocksize, mine.nested, mine.quant_type)
    if same != (saved.shape, saved.blocksize, saved.nested, saved.quant_type):
        # torch hands over lists of missing and of unexpected keys and,
        # as the last one, of errors that it raises together.
        lists[-1].append(f"{prefix}weight is quantized in another way")
        return
    with torch.no_grad():
        mine.absmax.copy_(saved.absmax)
        if mine.nested:
            mine.offset.copy_(saved.offset)
            mine.state2.absmax.copy_(saved.state2.absmax)
