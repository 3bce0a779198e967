"""Weights of four bits (bitsandbytes): what hangs off such a parameter, and how a backward finds it again.

A ``Params4bit`` holds packed numbers; its ``quant_state`` holds the scales without which they mean nothing. Modules know
nothing of these, so that they are found here: the scales of the weights (``absmax``) are tensors of a block like any
other, frozen ones, that travel with the weights. The scales of the scales and the tables are small (a two-thousandth of
the weights, and a kilobyte), and stay on the device with what else lies outside the blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

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
        for key, tensor in _tables_of(state) if state is not None else ():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{name}.{key}", tensor


def _tables_of(state: Any) -> Iterator[NamedTensor]:
    yield "quant_map", state.code
    if state.nested:
        yield "nested_offset", state.offset
        yield "nested_absmax", state.state2.absmax
        yield "nested_quant_map", state.state2.code


def prepare(model: nn.Module) -> None:
    """Let the weights of four bits in ``model`` move, if there are any; the numbers stay as they are.

    Scales become parameters that are not trained, as nothing else tells them from a tensor that an operation has made;
    layers keep their way of packing (on some CPUs they would change it with the first call in evaluation mode, for
    good); and a product hands its weight to autograd (see :func:`_save_weights`).
    """
    found = False
    for module in model.modules():
        for parameter in module._parameters.values():
            state = getattr(parameter, "quant_state", None)
            if state is None:
                continue
            found = True
            if not isinstance(state.absmax, nn.Parameter):
                state.absmax = nn.Parameter(state.absmax, requires_grad=False)
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    if found:
        _save_weights()


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
                    ctx.tensors = None, None
            return product.backward(ctx, *gradients)

    functions.MatMul4Bit = MatMul4Bit

