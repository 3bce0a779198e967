"""The definition of the lossless form of bfloat16 weights, in operations of torch that all devices have.

A number has a sign, eight bits of exponent and seven of mantissa, and nearly all numbers of a weight have one of a few
exponents. The seven commonest have a code of three bits each. The code 7 is an escape: the exponent stands in a
byte of its own. Numbers are in blocks of 1,024, and each block says where its escapes begin, so that it can be opened
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lt_offload.model.forms.base import Layout

BLOCK = 1024
"""Numbers."""
PLANES = 3
"""Bits of a code."""
ESCAPE = 7
"""The code of all exponents but the seven commonest."""
_STEP = 1 << 10
"""Blocks that are closed or opened at a time, so that what is computed between takes some tens of megabytes at most."""
_INT32 = (1 << 31) - 1


class Closed(NamedTuple):
    """The pieces of a closed weight of ``n`` numbers in ``b`` blocks, ``e`` of them with an escape."""

    mantissas: Tensor
    """Signs and mantissas, a byte for each number; uint8 of ``(n,)``."""
    codes: Tensor
    """Codes of exponents; uint8 of ``(b, 3, 128)``: bit ``k`` of byte ``j`` of row ``i`` of a block is bit ``i`` of the
    code of its number ``8 * j + k``. Bits without a number are 0."""
    starts: Tensor
    """Escapes before each block; int32 of ``(b,)``."""
    escapes: Tensor
    """Exponents without a code, in the order of the numbers; uint8 of ``(e,)`` or longer, and never empty."""
    exponents: Tensor
    """Exponents by code, in ascending order, and a 0; uint8 of ``(8,)``."""


def blocks_of(numbers: int) -> int:
    """Return how many blocks ``numbers`` are in."""
    return -(-numbers // BLOCK)


def layout(numbers: int, escapes: int) -> Layout:
    """Return shapes and dtypes of the pieces of ``numbers`` with room for so many escapes."""
    blocks = blocks_of(numbers)
    return (
        ((numbers,), torch.uint8),
        ((blocks, PLANES, BLOCK // 8), torch.uint8),
        ((blocks,), torch.int32),
        ((max(1, escapes),), torch.uint8),
        ((1 << PLANES,), torch.uint8),
    )


def allocate(like: Tensor, numbers: int, escapes: int) -> Closed:
    """Return pieces without values, where ``like`` is."""
    return Closed(*(like.new_empty(shape, dtype=dtype) for shape, dtype in layout(numbers, escapes)))


def commonest(counts: Tensor) -> Tensor:
    """Return the piece ``exponents`` by how often each of 256 exponents occurs; the smaller one where two are alike."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return functional.pad(order[:ESCAPE].sort().values.to(torch.uint8), (0, 1))


def starts_of(counts: Tensor) -> Tensor:
    """Return the piece ``starts`` by the escapes of each block.

    Raises:
        ValueError: there are more escapes than 32 bits can count.
    """
    ends = counts.cumsum(0, dtype=torch.int64)
    if len(ends) and int(ends[-1]) > _INT32:
        raise ValueError(f"a weight with {int(ends[-1]):,} escapes is too large for the lossless form: split it")
    return (ends - counts).to(torch.int32)


def close(bits: Tensor) -> Closed:
    """Return the pieces of numbers.

    Args:
        bits: the numbers as int16, in one dimension.
    """
    counts = torch.zeros(256, dtype=torch.int64, device=bits.device)
    for begin, end, _ in _steps(len(bits)):
        counts += torch.bincount(_exponents(bits[begin:end]).int(), minlength=256)
    exponents = commonest(counts)
    closed = allocate(bits, len(bits), int(counts.sum() - counts[exponents[:ESCAPE].long()].sum()))
    closed.exponents.copy_(exponents)
    code_of = torch.full((256,), ESCAPE, dtype=torch.uint8, device=bits.device)
    code_of[exponents[:ESCAPE].long()] = torch.arange(ESCAPE, dtype=torch.uint8, device=bits.device)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    per_block, escapes = torch.zeros_like(closed.starts), [closed.escapes[:0]]
    for begin, end, blocks in _steps(len(bits)):
        part = bits[begin:end]
        closed.mantissas[begin:end] = ((part & 0x7F) | ((part >> 8) & 0x80)).to(torch.uint8)
        exponent = _exponents(part)
        code = code_of[exponent.int()]
        escapes.append(exponent[code == ESCAPE])
        whole = functional.pad(code, (0, BLOCK * (blocks.stop - blocks.start) - len(code))).view(-1, BLOCK)
        per_block[blocks] = (whole == ESCAPE).sum(1, dtype=torch.int32)
        for plane in range(PLANES):
            ones = ((whole >> plane) & 1).view(-1, BLOCK // 8, 8)
            closed.codes[blocks, plane] = (ones * weights).sum(-1, dtype=torch.uint8)
    closed.starts.copy_(starts_of(per_block))
    together = torch.cat(escapes)
    closed.escapes[: len(together)] = together
    closed.escapes[len(together) :] = 0
    return closed


def open_(closed: Closed, bits: Tensor) -> None:
    """Write the numbers that ``closed`` holds.

    Args:
        closed: the pieces.
        bits: where to write them, as int16 in one dimension.
    """
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    last = len(closed.escapes) - 1
    for begin, end, blocks in _steps(len(bits)):
        ones = (closed.codes[blocks].unsqueeze(-1) >> places) & 1
        code = (ones[:, 0] | (ones[:, 1] << 1) | (ones[:, 2] << 2)).view(-1, BLOCK)
        escaped = code == ESCAPE
        place = escaped.cumsum(1, dtype=torch.int32).sub_(1).add_(closed.starts[blocks].unsqueeze(1)).clamp_(0, last)
        exponent = torch.where(escaped, closed.escapes[place], closed.exponents[code.int()])
        exponent = exponent.view(-1)[: end - begin].to(torch.int16)
        # As a signed byte a number's sign comes to its place when it gets sixteen bits, and fills that of the exponent.
        mantissa = closed.mantissas[begin:end].view(torch.int8).to(torch.int16) & -0x7F81
        torch.bitwise_or(mantissa, exponent << 7, out=bits[begin:end])


def sample(device: torch.device) -> Tensor:
    """Return numbers as int16 by which other code is compared with this: as in weights, and some of all exponents."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn(5000, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    every = torch.arange(-(1 << 15), 1 << 15, 37, dtype=torch.int16, device="cpu")
    return torch.cat([numbers.view(torch.int16), every]).to(device)


def _exponents(bits: Tensor) -> Tensor:
    return ((bits >> 7) & 0xFF).to(torch.uint8)


def _steps(numbers: int) -> Iterator[tuple[int, int, slice]]:
    """Yield first and last number, and blocks, of what is closed or opened at a time."""
    for block in range(0, blocks_of(numbers), _STEP):
        begin, end = block * BLOCK, min(numbers, (block + _STEP) * BLOCK)
        yield begin, end, slice(block, block + blocks_of(end - begin))
