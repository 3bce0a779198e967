"""Gradients of all processes, added up in the order of ranks: the numbers of one process that takes them in turn.

An all-reduce adds in an order of its backend's, which depends on where in a buffer an element is. Here each process
gets one part of everybody's buffer, adds these parts in the order of ranks, and hands the sum on to all. That moves as
many bytes as a ring does, and an element's sum is the same wherever it lies: with three ranks or more, too. Between
machines, whose processes have everybody's gradients in memory that they share, each adds in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 8 << 20
"""Bytes that are added up at once; two buffers of this size are taken beside the gradients."""
PART_BYTES = 1 << 20
"""Bytes that go from one machine to the next at once."""
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""By the name that it has in this version of torch: the older one is deprecated from 2.13 on."""
Run = Callable[[Callable[[], Any]], None]
"""A function that begins a collective, and waits for it."""


def add_rows(rows: Sequence[Tensor]) -> None:
    """Add to the first of ``rows`` the others, one after the other."""
    first, *others = rows
    with torch.no_grad():
        for other in others:
            first.add_(other)


def add_up(tensors: Sequence[Tensor], group: Any, run: Run, add: Callable[[Sequence[Tensor]], None]) -> None:
    """Let each of ``tensors`` be its sum over all processes of ``group``, in the order of ranks.

    All processes call this with tensors of the same sizes, dtypes and kinds of device, in the same order. ``tensors``
    are changed in place. ``run`` begins a collective, and waits for it. ``add`` lets the first of some tensors be the
    sum of what all processes have of a part; where ``group`` is one machine's, of what those of other machines have,
    too.
    """
    world = dist.get_world_size(group)
    for parts in _buckets(tensors, BUCKET_BYTES):
        sizes = [part.numel() for part in parts]
        # A backend wants equal parts for all.
        length = -(-sum(sizes) // world)
        sent = parts[0].new_zeros(world * length)
        torch.cat(parts, out=sent[: sum(sizes)])
        received = torch.empty_like(sent)
        run(partial(dist.all_to_all_single, received, sent, group=group, async_op=True))
        rows = received.view(world, length)
        add([*rows])
        run(partial(gather_single, sent, rows[0], group=group, async_op=True))
        for part, total in zip(parts, torch.split(sent[: sum(sizes)], sizes), strict=True):
            part.copy_(total)


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
    """Return a view of all elements in the order of memory: a gradient may be transposed, but lies without gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return tensor.detach().permute(order).view(-1)


# -- between machines --------------------------------------------------------------------------------------------------


def add_between(
    rows: Sequence[Sequence[Tensor]],
    group: Any,
    begin: Callable[[Callable[[], Any]], Any] = lambda collective: collective(),
    wait: Callable[[Any], None] = lambda work: work.wait(),
) -> None:
    """Let the first tensor of each of ``rows`` be the sum of all, on all machines, in the order of ranks.

    One process that takes the batches of all ranks in turn adds ``((r0 + r1) + r2) + r3``. Two sums of machines, added
    to each other, are ``(r0 + r1) + (r2 + r3)``, which is another number. So machine 0 broadcasts the sum of its ranks,
    machine 1 adds its own to that, one by one, and broadcasts it, and so on. Each is at another part at the same time.
    ``rows`` are flat, in host memory; each has what the processes of this machine have, in their order. ``group`` has
    one process of each machine, in their order, with rows of the same sizes.
    """
    machines = dist.get_process_group_ranks(group)
    place = dist.get_rank(group)
    parts = [part for row in rows for part in _parts(row)]
    before: dict[int, Tensor] = {}
    """By part: the sum of the machines before this one, whose own first row stays where it is."""
    for turn in range(len(parts) + len(machines) - 1):
        works = []
        for source, rank in enumerate(machines):
            number = turn - source
            if not 0 <= number < len(parts):
                continue
            total, *others = parts[number]
            if source < place:
                total = before.setdefault(number, torch.empty_like(total))
            elif source == place:
                # The sum of two does not depend on which one comes first.
                add_rows([total, *([before.pop(number)] if place else []), *others])
            works.append(begin(partial(dist.broadcast, total, src=rank, group=group, async_op=True)))
        for work in works:
            wait(work)


def _parts(row: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    if row[0].numel():
        yield from zip(*(torch.split(one, max(1, PART_BYTES // one.element_size())) for one in row), strict=True)
