"""Eight-bit integers with a scale per row: the largest number of a row becomes 127."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.model.forms.base import Layout, Pieces, StorageForm, as_bytes


class Int8(StorageForm):
    """Integers, and the scales of rows in float32."""

    name: ClassVar[str] = "int8"
    suffixes: ClassVar[tuple[str, ...]] = ("scale",)

    @override
    def close(self, weight: Tensor) -> Pieces:
        weight = weight.float()
        scale = weight.abs().amax(-1) / 127
        scale = torch.where(scale > 0, scale, 1.0)
        return (weight / scale[:, None]).round_().to(torch.int8).flatten(), as_bytes(scale)

    @override
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        numbers, scale = pieces
        out = torch.empty(tuple(shape), dtype=dtype, device=numbers.device)
        return torch.mul(numbers.view(*shape), scale.view(torch.float32)[:, None], out=out)

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        rows, columns = shape
        return ((rows * columns,), torch.int8), ((4 * rows,), torch.uint8)
