"""What one AdamW update is: the tensors of a parameter, the numbers of its group. Knows no way to carry it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Entry(NamedTuple):
    """One parameter to update."""

    param: Tensor
    grad: Tensor
    master: Tensor | None
    """What is updated instead of ``param``, which is then rounded from it; None: ``param`` itself is updated."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: float
    """Number of this update, 1 for the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What entries of one group have in common."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    grad_scale: float | Tensor = 1.0
    """Factor on every gradient, applied in the precision of the moments."""

    @property
    def scales(self) -> bool:
        """Whether the factor may change anything; one in a tensor is not looked at, it may be on a device."""
        return isinstance(self.grad_scale, Tensor) or self.grad_scale != 1.0

    def size(self, step: float) -> float:
        """Return the length of a step, in units of the moments' ratio."""
        size: float = float(self.lr) / (1 - self.beta1**step)
        return size

    def correction(self, step: float) -> float:
        """Return what the root of the second moment is divided by."""
        return math.sqrt(1 - self.beta2**step)


def tail(entry: Entry, unit: int) -> Entry:
    """Return what is left of a contiguous ``entry`` after as many whole units as it has."""
    start = entry.param.numel() // unit * unit
    return piece(entry, start, entry.param.numel())


def piece(entry: Entry, start: int, end: int) -> Entry:
    """Return elements of a contiguous ``entry``, as views."""
    return converted(entry, lambda tensor: tensor.view(-1)[start:end])


def converted(entry: Entry, convert: Callable[[Tensor], Tensor]) -> Entry:
    """Return ``entry`` with other tensors: what ``convert`` makes of each."""
    param, grad, master, exp_avg, exp_avg_sq, step = entry
    return Entry(
        convert(param),
        convert(grad),
        None if master is None else convert(master),
        convert(exp_avg),
        convert(exp_avg_sq),
        step,
    )
