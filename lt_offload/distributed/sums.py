"""Gradients of all processes, added up in the order of ranks: the numbers of one process that takes them in turn.

An all-reduce adds in an order of its backend's, which depends on where in a buffer an element is. Here each process
gets one part of everybody's buffer, adds these parts in the order of ranks, and hands the sum on to all. That moves as
many bytes as a ring does, and an element's sum is the same wherever it lies: with three ranks or more, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 8 << 20
"""Bytes that are added up at once; two buffers of this size are taken beside the gradients."""
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""By the name that it has in this version of torch: the older one is deprecated from 2.13 on."""


def add_rows(rows: Sequence[Tensor]) -> None:
    """Add to the first of ``rows`` the others, one after the other."""
    first, *others = rows
    with torch.no_grad():
        for other in others:
            first.add_(other)


def add_up(
    tensors: Sequence[Tensor],
    group: Any = None,
    run: Callable[[Callable[[], Any]], None] = lambda begin: begin().wait(),
    add: Callable[[Sequence[Tensor]], None] = add_rows,
) -> None:
    """Let each of ``tensors`` be its sum over all processes of ``group``, in the order of ranks.

    All processes call this with tensors of the same sizes, dtypes and kinds of device, in the same order.

    Args:
        tensors: are changed in place.
        group: of ``torch.distributed``; None: the default one.
        run: begins a collective, and waits for it.
        add: lets the first of some tensors be the sum of what all processes have of a part; where ``group`` is one
            machine's, of what those of other machines have, too.
    """
    for bucket in _buckets(tensors, BUCKET_BYTES):
        _add_up(bucket, group, run, add)


def _buckets(tensors: Sequence[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Yield flat parts of ``tensors``: those of one list have one dtype and device, and ``nbytes`` at most."""
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    for dtype, device in kinds:
        bucket: list[Tensor] = []
        room = most = max(1, nbytes // dtype.itemsize)
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != (dtype, device):
                continue
            # A sum of elements does not care where they were, so that parts of a tensor do as well as all of it.
            for part in torch.split(flat(tensor), most):
                if part.numel() > room:
                    yield bucket
                    bucket, room = [], most
                bucket.append(part)
                room -= part.numel()
        if bucket:
            yield bucket


def flat(tensor: Tensor) -> Tensor:
    """Return all elements of ``tensor`` as a view, in the order of memory.

    A gradient may be transposed or channels-last, but it lies without gaps.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return tensor.detach().permute(order).view(-1)


def _add_up(
    parts: list[Tensor],
    group: Any,
    run: Callable[[Callable[[], Any]], None],
    add: Callable[[Sequence[Tensor]], None],
) -> None:
    world = dist.get_world_size(group)
    sizes = [part.numel() for part in parts]
    # A backend wants equal parts for all.
    length = -(-sum(sizes) // world)
    sent = parts[0].new_zeros(world * length)
    torch.cat(parts, out=sent[: sum(sizes)])
    received = torch.empty_like(sent)
    run(lambda: dist.all_to_all_single(received, sent, group=group, async_op=True))
    rows = received.view(world, length)
    add([*rows])
    run(lambda: gather_single(sent, rows[0], group=group, async_op=True))
    for part, total in zip(parts, torch.split(sent[: sum(sizes)], sizes), strict=True):
        part.copy_(total)
