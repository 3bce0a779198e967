"""Optimizer states in eight bits: blocks of 256 numbers, each with the largest magnitude in it, and a byte per number.

The definition is that of bitsandbytes' AdamW8bit (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022,
sections 2 and 3): *dynamic tree quantization*, whose values lie in seven decades, with twice as many in each decade as
in the one below it. Decade i of 0 to 6 is cut into n = 2**i equal parts (2**(i + 1) where there is no sign), and its
values are their middles, ``10**(i - 6) * (0.1 + 0.9 * (f + 0.5) / n)``; beside them there are 0 and 1, but not -1. A
number is stored as the nearest of these values times the scale of its block.

Values follow from a code by a product with a whole number, and codes from a value by comparisons and one product, so
that a processor needs no table of a whole byte. They are those of bitsandbytes to the last bits of fp32: its table is
computed in another order. Bounds between values are their middles, to some last bits as well.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
"""Numbers that have a scale in common."""
_DECADES = 7
_ZERO = 127
"""The code of 0 among those with a sign; where there is none, it is 0."""
_BELOW_TWO = 2 - 2.0**-23
_SMALLEST = torch.finfo(torch.float32).tiny

Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ladder:
    """Constants of the values that are not negative, in fp32: those of 0, of the seven decades, and of 1, in order."""

    signed: bool
    unit: Row
    """Values are whole numbers of it: ``9 * odd - less``, where ``odd`` is ``2 * rank + 1``, or 2 more without sign."""
    less: Row
    ratio: Row
    """One over the length of a decade, which is nine times as long as what is below it."""
    bounds: Row
    """The smallest numbers that are in each, but for 0."""

    def ranks(self, numbers: Row) -> NDArray[np.int32]:
        """Return the ranks of the nearest among the values, for numbers from 0 to 1: the definition."""
        rung = np.searchsorted(self.bounds, numbers, side="right")
        # From 1 to 2, the binary fraction of which begins with the part of the decade in which the number is.
        place = (numbers * self.ratio[rung] + np.float32(8 / 9)).clip(np.float32(1), np.float32(_BELOW_TWO))
        bits: NDArray[np.int32] = (place.view(np.int32) & 0x7FFFFF) | 0x800000
        return (bits >> (23 + self.signed - rung).astype(np.int32)) - (not self.signed)


# In numpy, as torch's modes and default devices, under which these may be asked for first, are not to change them.
@functools.cache
def ladder(signed: bool) -> Ladder:
    """Return the constants of the map with a sign or of that without."""
    parts = [2 ** (i + (not signed)) for i in range(_DECADES)]
    tens = [10.0 ** (i - _DECADES + 1) for i in range(_DECADES)]
    first = [ten * (0.1 + 0.45 / n) for ten, n in zip(tens, parts, strict=True)]
    last = [ten * (1 - 0.45 / n) for ten, n in zip(tens, parts, strict=True)]
    rows = {
        "unit": [0.0, *(ten / (20 * n) for ten, n in zip(tens, parts, strict=True)), 1.0],
        "less": [0.0, *(16.0 * n for n in parts), 9.0 * (4 * parts[-1] + 1) - 1],
        "ratio": [0.0, *(1 / (0.9 * ten) for ten in tens), 0.0],
        "bounds": [(a + b) / 2 for a, b in zip([0.0, *last], [*first, 1.0], strict=True)],
    }
    return Ladder(signed, **{name: np.array(row, dtype=np.float32) for name, row in rows.items()})


@functools.cache
def values(signed: bool) -> Row:
    """Return what the 256 codes stand for, in ascending order, from -1 or 0 to 1."""
    constants = ladder(signed)
    odd = 2 * np.arange(129 if signed else 256) + (1 if signed else 3)
    rung = np.array([int(number).bit_length() - 1 - (not signed) for number in odd])
    upper = (9 * odd.astype(np.float32) - constants.less[rung]) * constants.unit[rung]
    return np.concatenate([-upper[1:-1][::-1], upper]) if signed else upper


@functools.cache
def bounds(signed: bool) -> Row:
    """Return for each rank but the first the smallest number from 0 to 1 that has it: found in the definition."""
    wanted = np.arange(1, 129 if signed else 256)
    below, above = np.zeros_like(wanted), np.full_like(wanted, 0x3F800000)  # 0 and 1, by their bits
    while (above - below > 1).any():
        middle = (below + above) // 2
        reached = ladder(signed).ranks(middle.astype(np.int32).view(np.float32)) >= wanted
        below, above = np.where(reached, below, middle), np.where(reached, middle, above)
    edges: Row = above.astype(np.int32).view(np.float32)
    return edges


def _tables(like: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return values and bounds where ``like`` is; fakes of them for a fake tensor."""
    return (_on if type(like) is Tensor else _on.__wrapped__)(like.device, signed)


@functools.cache
def _on(device: torch.device, signed: bool) -> tuple[Tensor, Tensor]:
    rows: tuple[Any, ...] = values(signed).tolist(), bounds(signed).tolist()
    table, edges = (torch.tensor(row, dtype=torch.float32, device=device) for row in rows)
    return table, edges


def blocks(elements: int) -> int:
    """Return the number of scales of so many numbers."""
    return -(-elements // BLOCK)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers that ``codes`` stand for, in fp32 and of their shape, with a scale per block of its rows."""
    table, _ = _tables(codes, signed)
    whole = _padded(codes.reshape(-1))
    numbers = table.index_select(0, whole.view(-1).int()).view(whole.shape).mul_(scales[:, None])
    return numbers.view(-1)[: codes.numel()].view(codes.shape)


def encode(numbers: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of fp32 ``numbers``: the nearest of the values times the largest magnitude in a block.

    A block in which a number is not finite has no numbers any more. One of nothing but numbers below the smallest
    normal one (1.2e-38) becomes zeros.
    """
    _, edges = _tables(numbers, signed)
    whole = _padded(numbers.reshape(-1))
    magnitudes = whole.abs()
    scales = magnitudes.amax(1)
    finite = torch.isfinite(scales)
    scales = torch.where(finite, scales, torch.nan)
    factor = torch.where(finite & (scales >= _SMALLEST), scales.reciprocal(), 0.0)
    # What is not a number has to be one to have a code; no code of its block is ever looked at.
    magnitudes.mul_(factor[:, None]).nan_to_num_(0.0)
    ranks = torch.bucketize(magnitudes, edges, out_int32=True, right=True)
    if signed:
        negative = whole.signbit()
        ranks = torch.where(negative, _ZERO - ranks.clamp(max=_ZERO), _ZERO + ranks)
    codes = ranks.view(-1)[: numbers.numel()].to(torch.uint8)
    return codes.view(numbers.shape), scales


def _padded(flat: Tensor) -> Tensor:
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
