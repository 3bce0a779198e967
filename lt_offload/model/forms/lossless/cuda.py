"""A kernel in Triton opens the lossless form on a GPU: a program for each block.

To import it takes Triton, which comes with PyTorch for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lt_offload.model.forms.lossless import plain
from lt_offload.model.forms.lossless.plain import BLOCK, Closed


@triton.jit  # type: ignore[untyped-decorator]
def _open(mantissas, codes, starts, escapes, exponents, bits, numbers, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block_size)
    number = block * block_size + lane
    inside = number < numbers
    plane = codes + block * (3 * (block_size // 8)) + lane // 8
    code = (tl.load(plane).to(tl.int32) >> (lane % 8)) & 1
    code |= ((tl.load(plane + block_size // 8).to(tl.int32) >> (lane % 8)) & 1) << 1
    code |= ((tl.load(plane + 2 * (block_size // 8)).to(tl.int32) >> (lane % 8)) & 1) << 2
    escaped = code == 7
    place = tl.load(starts + block) + tl.cumsum(escaped.to(tl.int32), 0) - 1
    exponent = tl.load(exponents + code).to(tl.int32)
    exponent = tl.where(escaped, tl.load(escapes + place, mask=escaped, other=0).to(tl.int32), exponent)
    mantissa = tl.load(mantissas + number, mask=inside, other=0).to(tl.int32)
    whole = ((mantissa & 0x80) << 8) | (exponent << 7) | (mantissa & 0x7F)
    tl.store(bits + number, whole.to(tl.int16), mask=inside)


def open_(closed: Closed, bits: Tensor) -> None:
    """Write the numbers that contiguous pieces hold, as :func:`.plain.open_` does."""
    with torch.cuda.device_of(bits):  # type: ignore[no-untyped-call]
        # It has no products to fuse with sums; Triton 3.9 warns where nothing is said about that.
        _open[(len(closed.starts),)](*closed, bits, len(bits), block_size=BLOCK, enable_fp_fusion=False)


def agrees(device: torch.device) -> bool:
    """Return whether the kernel opens as :mod:`.plain` does on ``device``, tried on a sample."""
    bits = plain.sample(device)
    opened = torch.empty_like(bits)
    open_(plain.close(bits), opened)
    return torch.equal(opened, bits)
