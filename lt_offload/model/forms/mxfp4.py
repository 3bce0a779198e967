"""MXFP4 (OCP Microscaling Formats 1.0): numbers of four bits (e2m1), 32 of a row to a power of two (e8m0).

The layout is that of gpt-oss: blocks of 16 bytes, the number with the even place in the lower half of a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.model.forms.base import Form, Layout, Pieces, constant

BLOCK = 32
"""Numbers that share a scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_LARGEST_EXPONENT = 2
"""Of the numbers of four bits."""


class MXFP4(Form):
    """Bytes of two numbers, and exponents."""

    name: ClassVar[str] = "mxfp4"
    suffixes: ClassVar[tuple[str, ...]] = ("scales",)

    @override
    def close(self, weight: Tensor) -> Pieces:
        rows, columns = weight.shape
        blocks = weight.float().reshape(rows, columns // BLOCK, BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        # frexp: the mantissa is from 0.5 on, so that its exponent is one more than that of the format.
        exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
        exponent = torch.where(largest > 0, exponent, 0).clamp_(-_BIAS, _BIAS)
        scaled = torch.ldexp(blocks, -exponent)
        size, codes = scaled.abs(), torch.zeros_like(scaled, dtype=torch.uint8)
        for code, (low, high) in enumerate(zip(_VALUES, _VALUES[1:], strict=False)):
            middle = (low + high) / 2  # half way, the even code is taken
            codes += (size > middle) if code % 2 == 0 else (size >= middle)
        codes |= scaled.signbit().to(torch.uint8) << 3
        packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return packed, (exponent.squeeze(-1) + _BIAS).to(torch.uint8)

    @override
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        packed, exponents = pieces
        pairs = constant(_PAIRS[dtype], packed)
        out = pairs.index_select(0, packed.reshape(-1).int()).view(*exponents.shape, BLOCK)
        # The bits of a power of two in float32; the smallest one is a subnormal number.
        power = torch.where(exponents == 0, 1 << 22, exponents.int() << 23).view(torch.float32)
        return torch.mul(out, power[..., None], out=out).view(*shape)

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        rows, columns = shape
        return ((rows, columns // BLOCK, BLOCK // 2), torch.uint8), ((rows, columns // BLOCK), torch.uint8)

    @override
    def refuses(self, shape: Sequence[int]) -> str:
        return f"rows of no multiple of {BLOCK} numbers" if shape[-1] % BLOCK else ""


def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two numbers of each byte."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=dtype, device=device)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)


def _of(dtype: torch.dtype) -> object:
    return lambda device: _pairs(dtype, device)


_PAIRS = {dtype: _of(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
