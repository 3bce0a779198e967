"""AdamW by torch's own operations, on any device and for every dtype and layout: what all other ways are compared with.

The arithmetic is that of torch's fused kernel. Tensors with a master are updated piece by piece: a converted gradient
stays in the cache and takes little memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
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


_HOST_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 22
"""Elements of a piece. The fused kernel rounds what is left over behind the last full vector in another way, so pieces
are multiples of every vector length: then they give the bits of a whole tensor."""


def update(entries: Sequence[Entry], options: Options) -> None:
    """Update ``entries`` in place; gradients stay as they are."""
    together: defaultdict[tuple[torch.device, torch.dtype], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.master is None and not options.scales:
            together[entry.param.device, entry.param.dtype].append(entry)
            continue
        for part in _pieces(entry):
            target = part.param if part.master is None else part.master
            grad = torch.empty_like(target).copy_(part.grad)
            if options.scales:
                grad.mul_(options.grad_scale)
            _fused([part._replace(param=target, grad=grad)], options)
            if part.master is not None:
                part.param.copy_(target)
    for alike in together.values():
        _fused(alike, options)


def _pieces(entry: Entry) -> Iterator[Entry]:
    """Cut an entry into parts of bounded size, if its tensors have one order in memory that allows it."""
    length = _HOST_PIECE if entry.param.device.type == "cpu" else _DEVICE_PIECE
    if entry.param.numel() <= length or not all(t is None or t.is_contiguous() for t in entry[:-1]):
        yield entry
        return
    for start in range(0, entry.param.numel(), length):
        yield piece(entry, start, start + length)


def _fused(entries: Sequence[Entry], options: Options) -> None:
    """Update ``param`` itself, and no other; the entries are on one device."""
    steps: dict[float, Tensor] = {}
    for entry in entries:
        if entry.step not in steps:
            steps[entry.step] = torch.full((), entry.step, dtype=torch.float32, device=entry.param.device)
    torch._fused_adamw_(
        [entry.param for entry in entries],
        [entry.grad for entry in entries],
        [entry.exp_avg for entry in entries],
        [entry.exp_avg_sq for entry in entries],
        [],
        [steps[entry.step] for entry in entries],
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )
