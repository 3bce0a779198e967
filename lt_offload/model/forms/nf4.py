"""NF4: four bits per number, 64 numbers to a scale, as QLoRA (Dettmers et al., 2023) and bitsandbytes define it.

Blocks are of the numbers of a matrix in the order of its rows, which need not be whole blocks. A scale takes eight
bits, 256 of them have a scale of their own, and all have one offset: 4.127 bits per number.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.errors import ConfigError
from lt_offload.model.forms.base import Form, Layout, Pieces, as_bytes, constant


def bitsandbytes() -> Any:
    """Return the package."""
    # It says at warning level which CPU kernels are not installed; ours are few and are not these.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError("quantize='nf4' needs the package bitsandbytes: pip install bitsandbytes") from None


@dataclass(frozen=True)
class NF4(Form):
    """Packed numbers, scales, and the offset of scales with their own scales."""

    name: ClassVar[str] = "nf4"
    suffixes: ClassVar[tuple[str, ...]] = ("absmax", "nested")
    needs: ClassVar[str] = "bitsandbytes"

    block: int = 64
    """Numbers that share a scale."""
    scales: int = 256
    """Scales that share a scale; 0: they are in float32."""

    @override
    def close(self, weight: Tensor) -> Pieces:
        packed, state = bitsandbytes().functional.quantize_4bit(
            weight.contiguous(), blocksize=self.block, compress_statistics=bool(self.scales), quant_type="nf4"
        )
        return self.pieces(packed, state)

    def pieces(self, packed: Tensor, state: Any) -> Pieces:
        """Return the pieces of a weight that bitsandbytes has quantized; ``state`` is its ``QuantState``."""
        if not state.nested:
            return packed.reshape(-1), as_bytes(state.absmax)
        return packed.reshape(-1), state.absmax, as_bytes(torch.cat([state.offset.view(1), state.state2.absmax]))

    @override
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        bitsandbytes()  # which brings its operations
        operations: Any = torch.ops.bitsandbytes
        packed, absmax, *nested = pieces
        if nested:
            offset, scales = nested[0].view(torch.float32).split([1, nested[0].shape[-1] // 4 - 1])
            code = constant(_map_of_scales, absmax)
            absmax = operations.dequantize_blockwise.default(absmax, scales, code, self.scales, torch.float32)
            absmax += offset
        else:
            absmax = absmax.view(torch.float32)
        out: Tensor = operations.dequantize_4bit.default(packed, absmax, self.block, "nf4", tuple(shape), dtype)
        return out

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        numbers = math.prod(shape)
        blocks, packed = -(-numbers // self.block), -(-numbers // 2)
        if not self.scales:
            return ((packed,), torch.uint8), ((4 * blocks,), torch.uint8)
        nested = 4 * (1 + -(-blocks // self.scales))
        return ((packed,), torch.uint8), ((blocks,), torch.uint8), ((nested,), torch.uint8)


def _map_of_scales(device: torch.device) -> Tensor:
    created: Tensor = bitsandbytes().functional.create_dynamic_map()
    return created.to(device)
