"""Weights of four bits (bitsandbytes): what hangs off such a parameter, and how a backward finds it again.

A ``Params4bit`` holds packed numbers; its ``quant_state`` holds the scales without which they mean nothing. Modules
know nothing of these, so that they are found here: the scales of the weights (``absmax``) are tensors of a block like
any other, frozen ones, that travel with the weights. The scales of the scales and the tables are small, a thousandth of
the weights, and stay on the device with what else lies outside the blocks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import parameters_of

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


def _heed_autocast() -> None:
    """Let a layer of four bits compute in the dtype of ``torch.autocast`` before it calls bitsandbytes.

    Otherwise a product inside that operation would be the first that autocast sees, and it does not, if a dispatch mode
    has seen the operation. On the CPU the numbers are the same: the weight is rounded to that dtype in either case.
    """
    modules: Any = sys.modules.get("bitsandbytes.nn.modules")
    layer: Any = None if modules is None else modules.Linear4bit
    if layer is None or hasattr(layer, "heeds_autocast"):
        return
    plain, package = layer.forward, sys.modules["bitsandbytes"]

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


def is_packed(parameter: object) -> bool:
    """Return whether ``parameter`` is a weight of four bits."""
    return getattr(parameter, "quant_state", None) is not None


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of four bits in ``model``, by name."""
    for name, module in model.named_modules():
        if is_packed(parameters_of(module).get("weight")):
            yield name, module
