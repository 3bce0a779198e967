"""Liger's kernels as they are planned: one operation each, with its reads and writes, without Triton or a GPU.

What is saved follows ``liger_kernel.ops`` (``rms_norm.py``, ``swiglu.py``, ``geglu.py``): a norm its input and a
number per row, a gated activation its two inputs, over which its backward writes their gradients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.profiling.from_config.compiled import written_as

_fused: Any = torch.ops.lt_offload.fused.default


def _kernel(read: Sequence[Tensor], like: Sequence[Tensor], *, rows: int = 0) -> list[Tensor]:
    """Return the results of a kernel that reads ``read``: tensors as ``like``, and a number for each of the rows."""
    sizes = [written_as(tensor) for tensor in like] + ([[[rows], [1], "float32"]] if rows else [])
    written: list[Tensor] = _fused(list(read), json.dumps(sizes))
    return written


class PlannedNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, of shape (..., features); the root of each row is saved in float32."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float, casts: str, in_place: bool
    ) -> Tensor:
        x = x.contiguous()
        out, roots = _kernel([x, weight], [x], rows=x.numel() // x.shape[-1])
        ctx.save_for_backward(x, weight, roots)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight, roots = ctx.saved_tensors
        gradients = _kernel([grads[0], x, weight, roots], [x, weight] if ctx.needs_input_grad[1] else [x])
        return gradients[0], gradients[1] if len(gradients) > 1 else None, None, None, None, None


class PlannedGated(torch.autograd.Function):
    """The product of an activation of ``gate`` and ``up``, all of one shape."""

    @staticmethod
    @override
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        (out,) = _kernel([gate, up], [gate])
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        # Over its inputs, as Liger's does: new tensors would count as memory that it never takes.
        torch.ops.lt_offload.fused_into.default([grads[0], gate, up], [gate, up])
        return gate, up
