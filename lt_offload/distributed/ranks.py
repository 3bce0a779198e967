"""The connections between the processes of a run: what one says to all, and what all say to each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lt_offload.compat.torch import default_store
from lt_offload.distributed import sums
from lt_offload.distributed.peers import Peers
from lt_offload.distributed.watch import PeerWatch
from lt_offload.errors import PlanError

Value = TypeVar("Value")
_MEASURED_BYTES, _MEASURED_TIMES, _LEAST_S = 8 * sums.PART_BYTES, 3, 1e-6


class Ranks(Peers):
    """This process and the others of its run, connected; ``torch.distributed`` has been initialised.

    What is said here goes through groups of its own, and always from the thread that drives training: collectives of
    users, of Lightning and of the engine never meet. Everybody makes these groups in the same order, here.
    ``per_machine`` of them, one after the other, share the memory of a machine; None: all. ``on_device``: gradients
    that are on a GPU are added up there, where torch has NCCL.
    """

    def __init__(self, *, per_machine: int | None = None, on_device: bool = False) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        count = per_machine or size
        number, self.machines = rank // count, size // count
        control = dist.new_group(backend="gloo")
        watch = PeerWatch(default_store(), rank, size, control.group_name, machine=number)
        # The store may have had other runs before, which failed.
        library: Any = dist  # whose types leave this out
        store = library.PrefixStore(f"lt_offload/{control.group_name}/sent", default_store().clone())
        super().__init__(range(size), control, watch, store)
        own = range(number * count, (number + 1) * count)
        self.machine: Peers = self if count == size else Peers(own, _group(own, "gloo"), watch, store)
        """The processes that share this one's memory."""
        uses_nccl = on_device and dist.is_nccl_available()
        self._on_device: Any = _group(own, "nccl") if uses_nccl else None
        column = range(rank % count, size, count)
        self._column = _group(column, "gloo") if count < size else None
        """The processes with this one's place on each machine, for the thread that trains."""
        self._beside = _group(column, "gloo") if count < size else None
        """The same for what is added up beside it."""

    def close(self) -> None:
        """Stop watching the others; the connections end with those of ``torch.distributed``."""
        self.watch.close()

    # -- what is said ------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce a ``tensor`` in host memory, in place."""
        self.meet("a reduction (sync_dist, EarlyStopping)")
        self.collective(lambda: dist.all_reduce(tensor, op=op, group=self.control, async_op=True))

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Let ``tensors``, which are in host memory, be the first process's."""
        for tensor in tensors:
            sent = tensor.contiguous()
            flat = sent.view(-1).view(torch.uint8)
            self.collective(partial(dist.broadcast, flat, src=0, group=self.control, async_op=True))
            if sent is not tensor:
                tensor.copy_(sent)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def warm_up(self, device: torch.device) -> None:
        """Add zeros up on ``device``, as gradients are; all processes call this.

        NCCL takes device memory of its own, as much as its channels need between these cards, with the first exchange
        of each kind and size. What is measured afterwards includes that.
        """
        if self._on_device is not None:
            self._add_up([torch.zeros(sums.BUCKET_BYTES // 4, device=device)], self._on_device)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Let each of ``tensors`` be its sum over all processes, in the order of ranks; see :func:`sums.add_up`."""
        if self._on_device is None:
            homes = [tensor.cpu() for tensor in tensors]
            self._add_up(homes, self.machine.control)
            for tensor, home in zip(tensors, homes, strict=True):
                if tensor is not home:
                    tensor.copy_(home)
            return
        self._add_up([tensor for tensor in tensors if tensor.device.type != "cpu"], self._on_device)
        self._add_up([tensor for tensor in tensors if tensor.device.type == "cpu"], self.machine.control)

    def add_up_rows(self, rows: Sequence[Sequence[Tensor]], *, op: int | None = None) -> None:
        """Let the first of each of ``rows`` be the sum of them all, on all machines, in the order of ranks.

        ``rows`` are in host memory; each has what the processes of this machine have, in their order, and those with
        this process's place on the other machines give rows of the same sizes. ``op`` of the plan is carried out by a
        thread beside the one that trains; each has connections of its own. Raises ``PlanError`` if another machine is
        at another op, whose rows are of the same sizes, and ``ProcessError`` if another process has failed.
        """
        if self._column is None:
            for row in rows:
                sums.add_rows(row)
            return
        flat = [[sums.flat(tensor) for tensor in row] for row in rows]
        ops = torch.tensor([op or 0])
        sums.add_between([[ops], *flat], self._column if op is None else self._beside, self.translated, self.wait)
        # Rows of alike blocks would be added up without a word.
        if int(ops) != (op or 0) * self.machines:
            raise PlanError(f"machines add up in different orders: process {dist.get_rank()} is at op {op}")

    def measure_network(self) -> tuple[float, float]:
        """Return bytes per second of a machine's network in each direction, and seconds of a hop: the slowest ones.

        All processes add up a few megabytes with those of other machines, as in training, at the same time.
        """
        hops = 2 * (self.machines - 1)
        small, large = torch.zeros(1), torch.zeros(_MEASURED_BYTES // 4)
        seconds = {}
        for sample in (small, large):
            self.add_up_rows([[sample]], op=0)  # connections are made
            times = []
            for _ in range(_MEASURED_TIMES):
                self.barrier()
                began = time.perf_counter()
                self.add_up_rows([[sample]], op=0)
                times.append(time.perf_counter() - began)
            seconds[sample] = max(self.gather(min(times)))
        hop = seconds[small] / hops
        # The first part takes the way alone; with it gone, all machines are at work.
        moved = (self.machines - 1) * _MEASURED_BYTES + hops * sums.PART_BYTES
        return self.machine.size * moved / max(seconds[large] - seconds[small], _LEAST_S), hop

    def _add_up(self, tensors: Sequence[Tensor], group: Any) -> None:
        if tensors:
            sums.add_up(tensors, group, self.collective, self._of_machines)

    def _of_machines(self, rows: Sequence[Tensor]) -> None:
        homes = rows if self._column is None else [row.cpu() for row in rows]
        self.add_up_rows([homes])
        if homes[0] is not rows[0]:
            rows[0].copy_(homes[0])


def _group(ranks: Sequence[int], backend: str) -> Any:
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
