"""How gradients leave for the host: which copies one op takes, where they arrive, what they keep. Knows no backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lt_offload.execute.device import Cell, Device, Event
from lt_offload.execute.params import Weight, carve, distinct
from lt_offload.plan.schedule import Op
from lt_offload.profile.types import GATHERED_BELOW

SMALL_GRADIENT = GATHERED_BELOW
"""Gradients of fewer bytes are gathered on the device first. A copy takes some 5 to 10 microseconds to begin, in which
a link moves this much; beside the gradients of a block the gathered ones hardly take memory."""


class Departure:
    """Gradients on their way to the host; calling it lets go of their device memory once they have been copied."""

    def __init__(self, device: Device, event: Event, memory: Cell, kept: list[Tensor]) -> None:
        self.device, self.event, self.memory, self.kept = device, event, memory, kept

    def __call__(self) -> None:
        """Order the compute lane after the copy and release the memory."""
        self.device.wait(self.event, writes=[self.memory])
        self.kept.clear()


class Outbox:
    """The gradients of one op, side by side in host memory, those of one dtype that are small without a gap."""

    def __init__(self, device: Device, op: Op, weights: Sequence[Weight]) -> None:
        self.op = op
        self.hosts: dict[int, Tensor] = {}
        """Where each gradient arrives, by the weight's index."""
        self.cell = Cell(f"host grad {op.block}")
        self._device, self._label = device, f"offload grad {op.block}"
        self._small: dict[torch.dtype, tuple[tuple[int, ...], Tensor]] = {}
        """By dtype: the weights whose gradients are gathered, and their host memory."""
        small: defaultdict[torch.dtype, list[Weight]] = defaultdict(list)
        for weight in weights:
            weight.grad_cell = self.cell
            if weight.nbytes < SMALL_GRADIENT:
                small[weight.host.dtype].append(weight)
        gathered = {dtype: found for dtype, found in small.items() if len(found) > 1}
        alone = [w for w in weights if w not in gathered.get(w.host.dtype, ())]
        parts = [((sum(w.nbytes for w in found),), torch.uint8) for found in gathered.values()]
        _, tensors = device.host_group([*parts, *((tuple(w.host.shape), w.host.dtype) for w in alone)])
        for (dtype, found), memory in zip(gathered.items(), tensors, strict=False):
            self._small[dtype] = tuple(weight.index for weight in found), memory.view(dtype)
            self._divide(memory, found)
        self.hosts.update((w.index, host) for w, host in zip(alone, tensors[len(parts) :], strict=True))

    def send(self, items: Sequence[tuple[Weight, Tensor]]) -> Departure:
        """Queue the copies of ``items``, as one task."""
        pairs = self._pairs(items)
        memory = Cell(self._label)
        event = self._device.submit(
            "d2h",
            _copies(self._device.copy, pairs),
            # the last update read the host buffers and wrote the weights
            after=[self._device.mark(writes=[memory]), *distinct(weight.parcel.current for weight, _ in items)],
            reads=[memory],
            writes=[self.cell],
            label=self._label,
            op=self.op.id,
            nbytes=sum(host.nbytes for host, _ in pairs),
        )
        return Departure(self._device, event, memory, [source for _, source in pairs])

    def _divide(self, memory: Tensor, weights: Iterable[Weight]) -> None:
        at = 0
        for weight in weights:
            self.hosts[weight.index] = carve(memory, at, weight.host)
            at += weight.nbytes

    def _pairs(self, items: Sequence[tuple[Weight, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return what is copied where; small gradients are gathered, unless some of them have not come."""
        grads = {weight.index: grad for weight, grad in items}
        pairs = []
        for indices, host in self._small.values():
            if all(index in grads for index in indices):
                with torch.no_grad():
                    pairs.append((host, torch.cat([grads.pop(index).reshape(-1) for index in indices])))
        return pairs + [(self.hosts[index], grad) for index, grad in grads.items()]


def _copies(copy: Callable[[Tensor, Tensor], None], pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    def run() -> None:
        for host, grad in pairs:
            copy(host, grad)

    return run
