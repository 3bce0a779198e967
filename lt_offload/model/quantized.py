"""Weights of four bits (bitsandbytes): what hangs off such a parameter, and how a backward finds it again.

A ``Params4bit`` holds packed numbers; its ``quant_state`` holds the scales without which they mean nothing. Modules
know nothing of these, so that they are found here: the scales of the weights (``absmax``) are tensors of a block like
any other, frozen ones, that travel with the weights. The scales of the scales and the tables are small, a thousandth of
the weights, and stay on the device with what else lies outside the blocks.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import parameters_of
from lt_offload.errors import ConfigError

BLOCK = 64
"""Numbers that share a scale."""
SCALES = 256
"""Scales that share a scale."""

NamedTensor = tuple[str, nn.Parameter]


def named_tensors(module: nn.Module) -> Iterator[NamedTensor]:
    """Yield the parameters of ``module``, each before the scales that it cannot be read without."""
    for name, parameter in module.named_parameters():
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield f"{name}.absmax", state.absmax


def tensors_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield what :func:`named_tensors` yields, without names."""
    for _, tensor in named_tensors(module):
        yield tensor


def tables(module: nn.Module) -> Iterator[NamedTensor]:
    """Yield the small tensors that the scales of ``module`` are read with, each once."""
    seen: set[int] = set()
    for name, parameter in module.named_parameters():
        state = getattr(parameter, "quant_state", None)
        held = {} if state is None else {"quant_map": state.code}
        if state is not None and state.nested:
            nested = {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
            held |= {"nested_offset": state.offset, **nested}
        for key, tensor in held.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{name}.{key}", tensor


def prepare(model: nn.Module) -> None:
    """Let the weights of four bits in ``model`` move, if there are any; the numbers stay as they are.

    Scales become parameters that are not trained, as nothing else tells them from a tensor that an operation has made;
    layers keep their way of packing (on some CPUs they would change it with the first call in evaluation mode, for
    good); a product hands its weight to autograd (:func:`_save_weights`), and heeds ``torch.autocast`` itself
    (:func:`_heed_autocast`).
    """
    packed = False
    for module in model.modules():
        for parameter in parameters_of(module).values():
            state = getattr(parameter, "quant_state", None)
            if state is None:
                continue
            packed = True
            if not isinstance(state.absmax, nn.Parameter):
                state.absmax = nn.Parameter(state.absmax, requires_grad=False)
            if hasattr(module, "support_avx512bf16_for_cpu"):
                vars(module)["support_avx512bf16_for_cpu"] = False
    if packed:
        _save_weights()
        _heed_autocast()


def _save_weights() -> None:
    """Let bitsandbytes' product of a weight of four bits save it by ``save_for_backward``.

    It keeps a view of the weight as an attribute, which no hook for saved tensors sees: after the weight has left the
    device, its backward would read what came there next.
    """
    functions: Any = sys.modules.get("bitsandbytes.autograd._functions")
    if functions is None or hasattr(functions.MatMul4Bit, "saves_weight"):
        return
    product: Any = functions.MatMul4Bit

    class MatMul4Bit(product):  # type: ignore[misc]
        """The same product, with the weight among the saved tensors."""

        saves_weight = True

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            out: Tensor = product.forward(ctx, *args)
            if not ctx.is_empty:
                others, weight = ctx.tensors
                ctx.tensors = others, None
                ctx.save_for_backward(weight)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not ctx.is_empty:
                ctx.tensors = None, *ctx.saved_tensors
                try:
                    return product.backward(ctx, *gradients)
                finally:
                    # Otherwise the node would hold the weight's device memory for as long as the graph lives.
                    ctx.tensors = None, None
            return product.backward(ctx, *gradients)

    functions.MatMul4Bit = MatMul4Bit


def check_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the layers of ``model`` that become layers of four bits.

    Not those with rows that are no multiple of a block (a vision tower's): some of bitsandbytes' products refuse them.
    """
    layers = [(name, layer) for name, layer in _linear(model) if not layer.in_features % BLOCK]
    outside = {id(parameter) for parameter in _kept(model)} | {id(layer.weight) for _, layer in layers}
    others = [
        (name, p) for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in outside and not is_packed(p)
    ]
    # Twice the packed ones: a byte has two numbers.
    done = sum(layer.weight.numel() for _, layer in layers) + sum(2 * m.weight.numel() for _, m in packed_layers(model))
    if sum(p.numel() for _, p in others) >= done:
        name, largest = max(others, key=lambda item: item[1].numel(), default=("none", None))
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__ if largest is not None else "nothing"
        raise ConfigError(
            f"quantize='nf4': most weights of {type(model).__name__} are no nn.Linear whose rows are a multiple of "
            f"{BLOCK} numbers, which share a scale (the largest, {name}, is in a {kind}); set it to null, or use a "
            "model whose layers are"
        )
    return layers


def empty_layer(layer: nn.Linear, dtype: torch.dtype) -> Any:
    """Return a layer of four bits of the size of ``layer``, with a weight that is yet to be given."""
    layer_class = bitsandbytes().nn.Linear4bit
    with torch.device("meta"):
        return layer_class(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=dtype, quant_type="nf4"
        )


def _heed_autocast() -> None:
    """Let a layer of four bits compute in the dtype of ``torch.autocast`` before it calls bitsandbytes.

    Otherwise a product inside that operation would be the first that autocast sees, and it does not, if a dispatch mode
    has seen the operation. On the CPU the numbers are the same: the weight is rounded to that dtype in either case.
    """
    modules: Any = sys.modules.get("bitsandbytes.nn.modules")
    layer: Any = None if modules is None else modules.Linear4bit
    if layer is None or hasattr(layer, "heeds_autocast"):
        return
    plain, package = layer.forward, bitsandbytes()

    @functools.wraps(plain)
    def forward(self: Any, x: Tensor) -> Tensor:
        state = getattr(self.weight, "quant_state", None)
        if state is None or not torch.is_autocast_enabled(x.device.type):
            out: Tensor = plain(self, x)
            return out
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            out = package.matmul_4bit(x.to(dtype), self.weight, bias=bias, quant_state=state)
            return out.to(x.dtype)

    layer.forward, layer.heeds_autocast = forward, True


def without_memory(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let the layers of ``model``, which is on the meta device, have weights of four bits there; return it."""
    bnb = bitsandbytes()
    for name, layer in check_layers(model):
        numbers, new = layer.weight.numel(), empty_layer(layer, dtype)
        with torch.device("meta"):
            scales = torch.empty(-(-numbers // BLOCK), dtype=torch.uint8)
            nested = bnb.functional.QuantState(
                torch.empty(-(-scales.numel() // SCALES)), code=torch.empty(256), blocksize=SCALES, dtype=torch.float32
            )
            state = bnb.functional.QuantState(
                scales,
                shape=layer.weight.shape,
                code=torch.empty(16),
                blocksize=BLOCK,
                quant_type="nf4",
                dtype=dtype,
                offset=torch.empty(()),
                state2=nested,
            )
            packed = torch.empty((numbers + 1) // 2, 1, dtype=torch.uint8)
        new.weight = bnb.nn.Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=new)
        new.quant_state = state
        new.bias = layer.bias
        model.set_submodule(name, new.train(layer.training))
    # What peft asks before it makes layers for adapters.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model


def replace_tables(state: Any, by: Callable[[Tensor], Any]) -> None:
    """Let every tensor of the quantisation state ``state`` be what ``by`` returns for it."""
    state.absmax, state.code = by(state.absmax), by(state.code)
    if state.nested:
        state.offset, state.state2.absmax, state.state2.code = map(
            by, (state.offset, state.state2.absmax, state.state2.code)
        )


def bitsandbytes() -> Any:
    """Return the package."""
    # It says at warning level which CPU kernels are not installed; ours are few and are not these.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError("quantize='nf4' needs the package bitsandbytes: pip install bitsandbytes") from None


def is_packed(parameter: object) -> bool:
    """Return whether ``parameter`` is a weight of four bits."""
    return getattr(parameter, "quant_state", None) is not None


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of four bits in ``model``, by name."""
    for name, module in model.named_modules():
        if is_packed(parameters_of(module).get("weight")):
            yield name, module


def _kept(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of embeddings and of the output projection."""
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        layer = getattr(model, getter, lambda: None)()
        if isinstance(layer, nn.Module):
            yield from layer.parameters()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters()


def uneven_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers of ``model`` that stay as they are for their rows, by name."""
    yield from ((name, layer) for name, layer in _linear(model) if layer.in_features % BLOCK)


def _linear(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    kept = {id(parameter) for parameter in _kept(model)}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module.weight) not in kept:
            yield name, module
