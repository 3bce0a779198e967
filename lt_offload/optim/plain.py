"""AdamW by torch's own operations, on any device and for every dtype and layout. The definition of all other ways.

The arithmetic is that of torch's fused kernel. Tensors with a master are updated piece by piece: a converted gradient
stays in the cache and takes little memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lt_offload.optim.entries import Entry, Options, piece

_HOST_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 22
"""Elements; multiples of every vector length, so that pieces are rounded as a whole tensor is."""


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
