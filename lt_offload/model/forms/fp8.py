"""Eight-bit floating-point numbers (e4m3) with a scale per square of 128 x 128, as DeepSeek and Qwen ship them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lt_offload.model.forms.base import Layout, Pieces, StorageForm, as_bytes

SQUARE = 128
"""Rows and columns that share a scale."""
_LARGEST = 448.0


class FP8(StorageForm):
    """The bytes of numbers, and scales in float32: what a number is multiplied with when it is opened."""

    name: ClassVar[str] = "fp8"
    suffixes: ClassVar[tuple[str, ...]] = ("scale_inv",)

    @override
    def close(self, weight: Tensor) -> Pieces:
        rows, columns = weight.shape
        high, wide = -(-rows // SQUARE), -(-columns // SQUARE)
        padded = functional.pad(weight.float(), (0, wide * SQUARE - columns, 0, high * SQUARE - rows))
        squares = padded.view(high, SQUARE, wide, SQUARE)
        scale = squares.abs().amax((1, 3)) / _LARGEST
        scale = torch.where(scale > 0, scale, 1.0)
        numbers = (squares / scale[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        kept = numbers.view(torch.uint8).view(padded.shape)[:rows, :columns]
        # Not .contiguous(): some rows would keep the memory of all, and safetensors refuses to load such tensors.
        return kept.clone(memory_format=torch.contiguous_format).flatten(), as_bytes(scale)

    @override
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        rows, columns = shape
        scale = pieces[1].view(torch.float32)
        numbers = pieces[0].view(torch.float8_e4m3fn).to(dtype).view(rows, columns)
        if rows % SQUARE == 0 and columns % SQUARE == 0:
            squares = numbers.view(rows // SQUARE, SQUARE, columns // SQUARE, SQUARE)
            return torch.mul(squares, scale[:, None, :, None], out=squares).view(rows, columns)
        each = scale.repeat_interleave(SQUARE, 0)[:rows].repeat_interleave(SQUARE, 1)[:, :columns]
        return torch.mul(numbers, each, out=numbers)

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        rows, columns = shape
        scales = -(-rows // SQUARE), 4 * -(-columns // SQUARE)
        return ((rows * columns,), torch.uint8), (scales, torch.uint8)
