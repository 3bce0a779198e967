"""The lossless form of bfloat16 weights: about 0.70 of their size, and every bit comes back.

NaN payloads, signs of zeros and subnormal numbers included. ``plain.py`` defines how pieces are made of numbers and
opened. Compiled code does the same on the host, and a kernel in Triton opens weights on a GPU.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lt_offload.model.forms.base import Layout, Pieces, StorageForm
from lt_offload.model.forms.lossless import host, plain
from lt_offload.model.forms.lossless.plain import Closed

_log = logging.getLogger(__name__)

SHARE = 1 / 32
"""Share of numbers that have an escape in weights as they usually are: pieces take 0.705 of the weight's bytes then."""


class Lossless(StorageForm):
    """Signs and mantissas, codes of exponents, and those without a code; there is room for ``SHARE`` of these."""

    name: ClassVar[str] = "lossless"
    suffixes: ClassVar[tuple[str, ...]] = Closed._fields[1:]

    @override
    def close(self, weight: Tensor) -> Pieces:
        bits = weight.detach().reshape(-1).view(torch.int16)
        compiled = host.library() if bits.is_cpu else None
        closed = plain.close(bits) if compiled is None else compiled.close(bits.contiguous())
        return _filled(closed, math.ceil(len(bits) * SHARE))

    @override
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        out = pieces[0].new_empty(tuple(shape), dtype=dtype)
        opened = out if dtype is torch.bfloat16 else pieces[0].new_empty(tuple(shape), dtype=torch.bfloat16)
        torch.ops.lt_offload.open_lossless_(opened, *pieces)
        return out if opened is out else out.copy_(opened)

    @override
    def stack(self, matrices: Sequence[Pieces]) -> Pieces:
        closed = [Closed(*pieces) for pieces in matrices]
        longest = max(len(each.escapes) for each in closed)
        return super().stack([_filled(each, longest) for each in closed])

    @override
    def layout(self, shape: Sequence[int]) -> Layout:
        numbers = math.prod(shape)
        return plain.layout(numbers, math.ceil(numbers * SHARE))

    @override
    def refuses(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        if dtype != torch.bfloat16:
            return f"numbers of {str(dtype).removeprefix('torch.')}, and not of bfloat16"
        return "too few numbers" if self.bytes(shape, dtype) >= dtype.itemsize * math.prod(shape) else ""


def _filled(closed: Closed, escapes: int) -> Closed:
    """Return the same with so many escapes at least: a weight may have more than others."""
    return closed._replace(escapes=functional.pad(closed.escapes, (0, max(0, escapes - len(closed.escapes)))))


# An operation of torch's, so that whoever watches what runs sees one, whatever carries it out.
_library = torch.library.Library("lt_offload", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = ", ".join(f"Tensor {name}" for name in Closed._fields)
_library.define(f"open_lossless_(Tensor(a!) out, {_ARGUMENTS}) -> ()")  # type: ignore[no-untyped-call]


def _open(out: Tensor, *pieces: Tensor) -> None:
    closed, bits = Closed(*(piece.contiguous() for piece in pieces)), out.view(-1).view(torch.int16)
    if not len(bits):
        return
    compiled = host.library() if bits.is_cpu else None
    if compiled is not None:
        compiled.open_(closed, bits)
    elif bits.is_cuda and has_kernel(bits.device):
        from lt_offload.model.forms.lossless import cuda

        cuda.open_(closed, bits)
    else:
        plain.open_(closed, bits)
    if not out.is_inference():
        # Autograd does not see what is written here: a graph that has saved this memory has to notice all the same.
        torch.autograd.graph.increment_version([out])


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether the kernel for GPUs runs on ``device``; the log says why not, once. Triton needs a C compiler."""
    try:
        from lt_offload.model.forms.lossless import cuda

        if cuda.agrees(device):
            return True
        reason = "its bits are not those of torch's operations"
    except Exception as error:  # of any library that Triton calls
        reason = str(error).partition("\n")[0]
    _log.warning("lossless weights are opened slower than they could be on %s: no kernel, as %s", device, reason)
    return False


_library.impl("open_lossless_", _open, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("open_lossless_", lambda *_: None, "Meta")  # type: ignore[no-untyped-call]
