"""The lossless form of bfloat16 as a storage form: pieces with room for as many escapes as weights usually have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.model.forms import lossless
from lt_offload.model.forms.base import Layout, Pieces, StorageForm


class Lossless(StorageForm):
    """Signs and mantissas, codes of exponents, and those without a code."""

    name: ClassVar[str] = "lossless"
    suffixes: ClassVar[tuple[str, ...]] = ("codes", "starts", "escapes", "exponents")

    @override
    def close(self, weight: Tensor) -> Pieces:
        try:
            return tuple(lossless.close(weight, room=lossless.SHARE, larger=True))
        except ValueError:  # more escapes than a plan without weights expects
            return tuple(lossless.close(weight, larger=True))

    @override
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return lossless.open_(tuple(pieces), shape, dtype)

    @override
    def stack(self, matrices: Sequence[Pieces]) -> Pieces:
        return tuple(lossless.stack(matrices))

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        return lossless.layout(shape)

    @override
    def refuses(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        if dtype != torch.bfloat16:
            return f"numbers of {str(dtype).removeprefix('torch.')}, and not of bfloat16"
        return "too few numbers" if self.bytes(shape, dtype) >= dtype.itemsize * math.prod(shape) else ""
