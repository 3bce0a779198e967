"""The lossless form of bfloat16 weights: about 0.70 of their size, and every bit comes back.

:func:`close` makes the pieces of a weight once, :func:`open_` writes the numbers that they hold, NaN payloads, signs of
zeros and subnormal numbers included. ``plain.py`` defines both. Compiled code does the same on the host, and a kernel
in Triton opens weights on a GPU.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lt_offload.model.forms.lossless import host, plain
from lt_offload.model.forms.lossless.plain import Closed, Layout

_log = logging.getLogger(__name__)

__all__ = ["SHARE", "Closed", "close", "has_kernel", "layout", "open_", "stack"]

SHARE = 1 / 32
"""Share of numbers that have an escape in weights as they usually are: pieces take 0.705 of the weight's bytes then."""


def layout(shape: Sequence[int], room: float = SHARE) -> Layout:
    """Return shapes and dtypes of the pieces of a weight of ``shape``, with room for such a share of escapes."""
    numbers = math.prod(shape)
    return plain.layout(numbers, math.ceil(numbers * room))


def close(weight: Tensor, *, room: float | None = None, larger: bool = False) -> Closed:
    """Return the pieces of a weight, on its device.

    Args:
        weight: bfloat16 of any shape. On the meta device and among fake tensors it has no numbers: then its pieces are
            such tensors too, with as many escapes as :data:`SHARE` says.
        room: share of numbers for whose escapes there is room, so that the layout does not depend on the numbers; None:
            as much as they need.
        larger: close it also if its pieces take as many bytes as it or more, as those of random bits do, and those of
            a few numbers.

    Raises:
        ValueError: it is not of bfloat16, has more escapes than ``room``, or its pieces would not be smaller.
    """
    weight = weight.detach()
    if weight.dtype is not torch.bfloat16:
        raise ValueError(f"the lossless form is for bfloat16: convert a weight of {weight.dtype} or leave it as it is")
    if weight.is_meta or type(weight) is not Tensor:
        closed = plain.allocate(weight, weight.numel(), math.ceil(weight.numel() * (SHARE if room is None else room)))
    else:
        bits = weight.reshape(-1).view(torch.int16)
        compiled = host.library() if bits.is_cpu else None
        closed = plain.close(bits) if compiled is None else compiled.close(bits.contiguous())
        if room is not None:
            escapes = math.ceil(weight.numel() * room)
            if len(closed.escapes) > max(1, escapes):
                raise ValueError(
                    f"a weight of shape {tuple(weight.shape)} has {len(closed.escapes):,} escapes in the lossless form "
                    f"and room for {escapes:,}: leave it as it is"
                )
            closed = _filled(closed, escapes)
    before, after = 2 * weight.numel(), sum(piece.nbytes for piece in closed)
    if after >= before and not larger:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} would take {after:,} bytes in the lossless form and takes "
            f"{before:,} as it is: leave it so"
        )
    return closed


def open_(
    pieces: tuple[Tensor, ...], shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Return the weight that :func:`close` or :func:`stack` made ``pieces`` of.

    Args:
        pieces: five tensors, all on one device.
        shape: of the weight; of a stack its first number is how many weights there are.
        dtype: of the weight that is returned; numbers are converted if it is not bfloat16.
        out: contiguous memory of ``shape`` that the weight is written to; new memory if None.

    Raises:
        ValueError: ``pieces`` or ``out`` are not for such a weight.
    """
    closed, shape = Closed(*pieces), tuple(shape)
    stacked = closed.starts.dim() == 2
    numbers = math.prod(shape[stacked:])
    sizes = closed.mantissas.shape, closed.starts.shape[-1]
    if sizes != ((*shape[:stacked], numbers), plain.blocks_of(numbers)):
        raise ValueError(
            f"pieces of {' x '.join(map(str, sizes[0]))} numbers are not those of a weight of shape {shape}"
        )
    if out is None:
        out = closed.mantissas.new_empty(shape, dtype=dtype)
    elif out.shape != shape or out.dtype is not dtype or not out.is_contiguous():
        strided = "" if out.is_contiguous() else " and not contiguous"
        raise ValueError(
            f"out= is {out.dtype} of shape {tuple(out.shape)}{strided}: it has to be contiguous {dtype} of {shape}"
        )
    if dtype is not torch.bfloat16:
        return out.copy_(open_(closed, shape))
    for part, each in zip(out, zip(*closed, strict=True), strict=True) if stacked else [(out, closed)]:
        torch.ops.lt_offload.open_lossless_(part, *each)
    return out


def stack(weights: Sequence[tuple[Tensor, ...]]) -> Closed:
    """Return closed weights of one shape as one: each piece has a dimension more, the first.

    Escapes are filled up to the longest. ``Closed(*(piece[i] for piece in pieces))`` is weight ``i`` again, and slices
    are stacks.
    """
    closed = [Closed(*pieces) for pieces in weights]
    longest = max(len(each.escapes) for each in closed)
    return Closed(*(torch.stack(pieces) for pieces in zip(*(_filled(each, longest) for each in closed), strict=True)))


def _filled(closed: Closed, escapes: int) -> Closed:
    return closed._replace(escapes=functional.pad(closed.escapes, (0, max(1, escapes) - len(closed.escapes))))


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
