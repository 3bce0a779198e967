"""What Liger's kernels compute, in plain operations: what they save, and that one backward writes over what it saved.

The kernels themselves need a GPU (``tests/gpu/test_gpu_kernels.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_offload.finetune.kernels import Functions


class Norm(torch.autograd.Function):
    """RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float, casts: str, in_place: bool
    ) -> Tensor:
        assert not in_place
        root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, root.flatten())
        ctx.offset = offset
        return ((x.float() * root) * (weight.float() + offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight, root = ctx.saved_tensors
        root = root.view(*x.shape[:-1], 1)
        normed, dy = x.float() * root, grads[0].float()
        inner = dy * (weight.float() + ctx.offset)
        dx = root * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        dw = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx.to(x.dtype), dw, None, None, None, None


class SiluMul(torch.autograd.Function):
    """The product of SiLU of one and another tensor."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        dgate, dup = grads[0] * up * share * (1 + gate * (1 - share)), grads[0] * F.silu(gate)
        # As Triton's kernels do: no version tells of it.
        gate.data.copy_(dgate)
        up.data.copy_(dup)
        return gate, up


FUNCTIONS = Functions(norm=Norm.apply, silu=SiluMul.apply, gelu=SiluMul.apply)
