"""NF4: four bits per number, 64 numbers to a scale, as QLoRA (Dettmers et al., 2023) and bitsandbytes define it.

Blocks are of the numbers of a matrix in the order of its rows, which need not be whole blocks. A scale takes eight
bits, 256 of them have a scale of their own, and all have one offset: 4.127 bits per number.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.errors import ConfigError
from lt_offload.model.forms.base import Constant, Layout, Pieces, StorageForm, as_bytes


def bitsandbytes() -> Any:
    """Return the package."""
    if "bitsandbytes" not in sys.modules:
        # It says at warning level which CPU kernels are not installed; ours are few and are not these. Once: setting a
        # level empties the caches of all loggers, and every expert's opening comes here.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError("quantize='nf4' needs the package bitsandbytes: pip install bitsandbytes") from None


@dataclass(frozen=True)
class NF4(StorageForm):
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
            nested_scales = nested[0].view(torch.float32)
            offset, scales = nested_scales[:1], nested_scales[1:]
            code = _CODE_OF_SCALES.beside(absmax)
            absmax = operations.dequantize_blockwise.default(absmax, scales, code, self.scales, torch.float32)
            absmax += offset
        else:
            absmax = absmax.view(torch.float32)
        # The kernel for CPUs begins a block with each row, and blocks go on from one to the next.
        whole = tuple(shape) if shape[-1] % self.block == 0 else (math.prod(shape),)
        out: Tensor = operations.dequantize_4bit.default(packed, absmax, self.block, "nf4", whole, dtype)
        return out.view(*shape)

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        numbers = math.prod(shape)
        blocks, packed = -(-numbers // self.block), -(-numbers // 2)
        if not self.scales:
            return ((packed,), torch.uint8), ((4 * blocks,), torch.uint8)
        nested = 4 * (1 + -(-blocks // self.scales))
        return ((packed,), torch.uint8), ((blocks,), torch.uint8), ((nested,), torch.uint8)


def check_scales(state: Any) -> None:
    """Raise ``ConfigError`` if the scales of a ``QuantState`` are coded in another way than bitsandbytes does."""
    if state.nested and not torch.equal(state.state2.code.cpu(), _code_of_scales()):
        raise ConfigError(
            "model.quantize=nf4: the model is stored in 4 bits whose scales have a code of their own; give the model "
            "that it was made of"
        )


def _code_of_scales() -> Tensor:
    created: Tensor = bitsandbytes().functional.create_dynamic_map()
    return created


_CODE_OF_SCALES = Constant(_code_of_scales, (256,))
