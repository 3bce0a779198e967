"""Host memory for arriving gradients: the place of each op's, and the copies that bring them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.memory.common import Common
from lt_offload.execute.memory.host_task import HostTask
from lt_offload.execute.memory.live_group import LiveGroup, complete_on_host, distinct
from lt_offload.execute.memory.tensors import Weight, carve
from lt_offload.execute.program import Program
from lt_offload.schema.plan import ALIGNMENT, Op
from lt_offload.schema.profile import GATHERED_BELOW
from lt_offload.units import round_up

SMALL_GRADIENT = GATHERED_BELOW
"""Gradients of fewer bytes are gathered on the device first. A copy takes some 5 to 10 microseconds to begin, in which
a link moves this much; beside the gradients of a block the gathered ones hardly take memory."""


class GradientOffload:
    """Gradients on their way to the host; calling it lets go of their device memory once they have been copied."""

    def __init__(self, device: Device, event: Event, memory: Cell, kept: list[Tensor]) -> None:
        self.device, self.event, self.memory, self.kept = device, event, memory, kept

    def __call__(self) -> None:
        """Order the compute lane after the copy and release the memory."""
        self.device.wait(self.event, writes=[self.memory])
        self.kept.clear()


class Slots:
    """The host memory to which gradients are copied, which those share that are not there at the same time.

    A copy comes after the updates that its op waits for in the plan: they read what was at its addresses. The memory is
    of ``common``, where all processes of the machine see what has arrived; None: it is this one's.
    """

    def __init__(
        self, device: Device, program: Program, weights: Sequence[Weight], common: Common | None = None
    ) -> None:
        self._updates = program.on_host_lane
        self._events: dict[int, list[Event]] = {}
        """By op of the host: what has to be over before memory that it reads is overwritten."""
        ranges = {op.id: program.addresses(op) for op in program.sends}
        self.beginning = program.begins
        """The copies to where sums are, by op."""
        self._device = device
        self._boxes = [GradientOffloads(op, [weights[t] for t in program.tensors[op.id]]) for op in program.sends]
        self.of: dict[int, GradientOffloads] = {box.op.id: box for box in self._boxes}
        """By op."""
        self.box_of = {t: box for box in self._boxes if box.op.rows != "looked up" for t in program.tensors[box.op.id]}
        """By tensor; of a table in two parts that of the last block's gradient."""
        islands = _islands(ranges.values())
        sizes = [high - low for low, high in islands]
        if common is None:
            rows = [[device.host_empty((size,), torch.uint8) for size in sizes]]
        else:
            rows = common.memory_of_all(sizes, "gradients") if sizes else []
        self.places: dict[int, tuple[Tensor, ...]] = {}
        """By weight: where its gradients arrive in all processes, in the order of ranks."""
        for rank, memory in enumerate(rows):
            for (low, high), island in zip(islands, memory, strict=True):
                for box in self._boxes:
                    start, end = ranges[box.op.id]
                    if not (low <= start and end <= high):
                        continue
                    if common is None or rank == common.machine.rank:
                        box.use(island[start - low : end - low])
                    if common is not None:
                        for index, place in box.places(island[start - low : end - low]).items():
                            self.places[index] = (*self.places.get(index, ()), place)
        self.hosts = {t: host for box in self._boxes if box.op.rows != "looked up" for t, host in box.hosts.items()}
        """By weight: where its gradient arrives in this process."""
        for box in self._boxes:
            start, end = ranges[box.op.id]
            # Told to the checker of what happens before what: a copy writes whatever other ops have at its addresses.
            box.cells = [o.cell for o in self._boxes if ranges[o.op.id][0] < end and start < ranges[o.op.id][1]]

    def send(
        self, box: GradientOffloads, items: Sequence[tuple[Weight, Tensor]], more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> GradientOffload:
        """Queue the copies of ``items`` to their slot, and those of ``more``, as one task."""
        pairs = [*box.pairs(items), *more]
        return _queued(self._device, box.op, items, pairs, self._freed(box.op), writes=box.cells)

    def begin_sums(
        self,
        op: Op,
        items: Sequence[tuple[Weight, Tensor]],
        norms: Sequence[Tensor | None],
        more: Sequence[tuple[Tensor, Tensor]] = (),
        cells: Sequence[Cell] = (),
    ) -> GradientOffload:
        """Queue the copies of ``items``, the first gradients of a window, to where their sums are, as one task.

        ``norms`` are theirs; None unless nothing will be added to a gradient. ``more`` is copied with them, to what the
        ``cells`` stand for.
        """
        totals = [total for weight, _ in items if (total := weight.total) is not None]
        pairs = [(total.host, grad) for total, (_, grad) in zip(totals, items, strict=True)]
        # The last update has used them up.
        groups = [total.group for total in totals]
        offload = _queued(self._device, op, items, [*pairs, *more], [], writes=cells, groups=groups)
        for total, norm in zip(totals, norms, strict=True):
            total.fill(norm)
        return offload

    def updated(self, op: int, event: Event) -> None:
        """Note that ``op`` of the host has been queued, which reads what has arrived."""
        self._events[op] = [event]

    def skipped(self, op: int, weights: Iterable[Weight]) -> None:
        """Note that nothing has arrived for ``op`` of the host: what was at its addresses before may be there still."""
        self._events[op] = self.freed(weights)

    def freed(self, weights: Iterable[Weight]) -> list[Event]:
        """Return what a copy of gradients of ``weights`` would come after, for whoever writes there instead."""
        boxes = dict.fromkeys(self.box_of[w.index] for w in weights if w.index in self.box_of)
        return distinct(event for box in boxes for event in self._freed(box.op))

    def _freed(self, op: Op) -> list[Event]:
        return [event for other in op.after if other in self._updates for event in self._events.get(other, ())]


def _islands(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of addresses that ``ranges`` cover together, apart where none of them crosses."""
    islands: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if islands and low < islands[-1][1]:
            islands[-1] = (islands[-1][0], max(islands[-1][1], high))
        else:
            islands.append((low, high))
    return islands


class GradientOffloads:
    """The gradients of one op, side by side in host memory, those of one dtype that are small without a gap."""

    def __init__(self, op: Op, weights: Sequence[Weight]) -> None:
        self.op = op
        self.hosts: dict[int, Tensor] = {}
        """By the weight's index: where its gradient arrives."""
        self.cell = Cell(f"host grad {op.block}")
        self.cells = [self.cell]
        """The cells of all ops that have some of its addresses."""
        self._weights = tuple(weights)
        self._small: dict[torch.dtype, tuple[tuple[int, ...], Tensor]] = {}
        """By dtype: the weights whose gradients are gathered, and their host memory."""
        for weight in weights if op.rows != "looked up" else ():
            weight.grad_cell = self.cell

    def use(self, memory: Tensor) -> None:
        """Let gradients arrive in ``memory``, bytes on the host."""
        self.hosts, self._small = self._divided(memory)

    def places(self, memory: Tensor) -> dict[int, Tensor]:
        """Return where each gradient arrives in another process, which uses ``memory``."""
        return self._divided(memory)[0]

    def _divided(self, memory: Tensor) -> tuple[dict[int, Tensor], dict[torch.dtype, tuple[tuple[int, ...], Tensor]]]:
        hosts: dict[int, Tensor] = {}
        gathered_in: dict[torch.dtype, tuple[tuple[int, ...], Tensor]] = {}
        if self.op.rows == "looked up":
            (table,) = self._weights
            width = table.host.shape[1]
            # One row per token: a batch may have more tokens than the table has rows.
            rows = self.op.bytes // (width * table.host.element_size())
            hosts[table.index] = carve(memory, 0, table.host.new_empty((rows, width), device="meta"))
            return hosts, gathered_in
        small: defaultdict[torch.dtype, list[Weight]] = defaultdict(list)
        for weight in self._weights:
            if weight.nbytes < SMALL_GRADIENT:
                small[weight.host.dtype].append(weight)
        at = 0
        gathered: set[int] = set()
        for dtype, alike in small.items():
            if len(alike) > 1:
                start, at = at, _divide(memory, at, alike, hosts)
                gathered_in[dtype] = tuple(w.index for w in alike), memory[start:at].view(dtype)
                gathered.update(weight.index for weight in alike)
                at = round_up(at, ALIGNMENT)
        for weight in self._weights:
            if weight.index not in gathered:
                at = round_up(_divide(memory, at, [weight], hosts), ALIGNMENT)
        return hosts, gathered_in

    def pairs(self, items: Sequence[tuple[Weight, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return what is copied where; small gradients are gathered, unless some of them have not come."""
        grads = {weight.index: grad for weight, grad in items}
        pairs = []
        for indices, host in self._small.values():
            # Gathered ones lie without a gap: where one has not come, the others would arrive at its place.
            if grads.keys() >= {*indices}:
                with torch.no_grad():
                    pairs.append((host, torch.cat([grads.pop(index).reshape(-1) for index in indices])))
        return pairs + [(self.hosts[index], grad) for index, grad in grads.items()]


def _divide(memory: Tensor, at: int, weights: Iterable[Weight], hosts: dict[int, Tensor]) -> int:
    """Give each of ``weights`` its part of ``memory`` from ``at`` on, in ``hosts``; return where the last one ends."""
    for weight in weights:
        hosts[weight.index] = carve(memory, at, weight.host)
        at += weight.nbytes
    return at


def _queued(
    device: Device,
    op: Op,
    items: Sequence[tuple[Weight, Tensor]],
    pairs: Sequence[tuple[Tensor, Tensor]],
    freed: Sequence[Event | None],
    *,
    writes: Sequence[Cell],
    groups: Sequence[LiveGroup] = (),
) -> GradientOffload:
    """Queue the copies ``pairs`` for ``items`` as one task after ``freed``; it changes ``writes`` and ``groups``."""
    label = f"offload grad {op.block}"
    memory = Cell(label)
    task = HostTask(lane="d2h", op=op.id, label=label, nbytes=sum([host.nbytes for host, _ in pairs]))
    task.work += [partial(device.copy, host, grad) for host, grad in pairs]
    # The last update wrote the weights.
    task.after += [device.mark(writes=[memory]), *freed, *complete_on_host([weight.group for weight, _ in items])]
    task.reads, task.writes, task.groups = [memory], [*writes], [*groups]
    return GradientOffload(device, task.queue(device), memory, [source for _, source in pairs])
