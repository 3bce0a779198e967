"""What becomes of a gradient: held until complete, then used on the device or sent to the host. Knows no steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakMethod

import torch
from torch import Tensor

from lt_offload.execute.device import Cell, Device, Event
from lt_offload.execute.params import Weight, distinct
from lt_offload.execute.updates import Updates
from lt_offload.plan.memory import COLLECTED_BELOW


class Departure:
    """Gradients on their way to the host; calling it lets go of their device memory once they have been copied."""

    def __init__(self, device: Device, event: Event, memory: Cell, kept: list[Tensor]) -> None:
        self.device, self.event, self.memory, self.kept = device, event, memory, kept

    def __call__(self) -> None:
        """Order the compute lane after the copy and release the memory."""
        self.device.wait(self.event, writes=[self.memory])
        self.kept.clear()


class Gradients:
    """Collects the gradients of a running backward and starts the updates."""

    def __init__(self, device: Device, updates: Updates, weights: Sequence[Weight]) -> None:
        self.device = device
        self.updates = updates
        self.square_sums: list[Tensor] | None = None
        """Squared norms of this iteration's gradients, if somebody asked for them."""
        self.updated = 0
        """Tensors updated in this iteration."""
        self._host_grads: dict[int, Tensor] = {}
        self._direct_grads = {w.index: device.direct_view(self._host_grad(w)) for w in weights if w.grad_direct}
        """Those of the host gradients that the backward writes itself, as the device sees them."""
        self._arrived: dict[int, Event] = {}
        self._on_device: list[tuple[Weight, Tensor]] = []
        self._to_host: list[tuple[Weight, Tensor]] = []
        self._written: list[Weight] = []
        self._touched: set[int] = set()
        self._handles = []
        by_param = {weight.param: weight for weight in weights}
        collect = WeakMethod(self._collect)

        def hook(param: Tensor) -> None:
            found = collect()
            if found is not None:
                found(by_param[param])  # type: ignore[index]

        for weight in weights:
            if weight.param.requires_grad:
                handle = weight.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds gradients."""
        return sum(grad.nbytes for grad in self._host_grads.values())

    def remove(self) -> None:
        """Detach every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self, weights: Sequence[Weight]) -> None:
        """Forget everything about an iteration that has not been finished."""
        for weight in weights:
            weight.seen, weight.grad = 0, None
            weight.param.grad = None
        self._on_device.clear()
        self._to_host.clear()
        self._written.clear()
        self._arrived.clear()
        self._touched.clear()

    def _collect(self, weight: Weight) -> None:
        grad = weight.param.grad
        assert grad is not None and weight.index not in self._touched
        weight.param.grad = None
        self._touched.add(weight.index)
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        weight.seen += 1
        if weight.seen == weight.uses:
            self._complete(weight)

    def _complete(self, weight: Weight) -> None:
        grad, weight.grad, weight.seen = weight.grad, None, 0
        if grad is None:
            return
        if self.square_sums is not None:
            self.square_sums.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square_())
        if weight.grad_direct:
            self._write_out(weight, grad)
        elif weight.place == "host":
            self._to_host.append((weight, grad))
        else:
            self._on_device.append((weight, grad))
            if grad.nbytes >= COLLECTED_BELOW:
                self.update_on_device()

    def end_block(self, weights: Sequence[Weight]) -> None:
        """Count the uses that gave no gradient, and update what is left of the block on the device."""
        for weight in weights:
            if weight.param.requires_grad and weight.index not in self._touched:
                weight.seen += 1
                if weight.seen == weight.uses:
                    self._complete(weight)
        self._touched.clear()
        self.update_on_device()

    def update_on_device(self) -> None:
        """Update every tensor whose gradient is complete and whose place is the device."""
        items, self._on_device = self._on_device, []
        if not items:
            return
        weights = [weight for weight, _ in items]
        buffers = [c.buffer for w in weights for c in (w, w.states) if c.buffer is not None]
        self.device.wait(*[w.states.ready for w in weights if w.states.ready is not None], writes=buffers)
        self.updates.update_on_device(weights, [grad for _, grad in items])
        self.updated += len(items)

    def _write_out(self, weight: Weight, grad: Tensor) -> None:
        """Write a gradient to host memory from the compute lane; nobody keeps it on the device."""
        # The last update, which read the host buffer, is over: the forward has seen the weight that it made.
        self.device.wait(writes=[weight.grad_cell])
        self.device.cross("d2h", grad.nbytes)
        with torch.no_grad():
            self._direct_grads[weight.index].copy_(grad)
        self._written.append(weight)

    def send(self, label: str, op_of: Callable[[Weight], int]) -> list[tuple[int, Departure]]:
        """Queue the copies of complete gradients to the host, one task per op; return what they keep alive, by op."""
        if self._written:
            written = self.device.mark()
            self._arrived.update((weight.index, written) for weight in self._written)
            self._written.clear()
        items, self._to_host = self._to_host, []
        by_op: dict[int, list[tuple[Weight, Tensor]]] = {}
        for weight, grad in items:
            by_op.setdefault(op_of(weight), []).append((weight, grad))
        return [(op, self._copy_out(op, label, members)) for op, members in by_op.items()]

    def _copy_out(self, op: int, label: str, items: list[tuple[Weight, Tensor]]) -> Departure:
        pairs = [(self._host_grad(weight), grad) for weight, grad in items]

        def copy() -> None:
            for host, source in pairs:
                self.device.copy(host, source)

        memory = Cell(f"grad {label}")
        event = self.device.submit(
            "d2h",
            copy,
            # the last update read the host buffers and wrote the weights
            after=[self.device.mark(writes=[memory]), *distinct(weight.current for weight, _ in items)],
            reads=[memory],
            writes=[weight.grad_cell for weight, _ in items],
            label=f"offload grad {label}",
            op=op,
            nbytes=sum(grad.nbytes for _, grad in items),
        )
        for weight, _ in items:
            self._arrived[weight.index] = event
        return Departure(self.device, event, memory, [grad for _, grad in items])

    def _host_grad(self, weight: Weight) -> Tensor:
        host = self._host_grads.get(weight.index)
        if host is None:
            host = self._host_grads[weight.index] = self.device.host_empty(weight.host.shape, weight.host.dtype)
        return host

    def update_on_host(self, weights: Sequence[Weight], label: str, op: int, urgency: int = 0) -> Event | None:
        """Queue the host's update of those ``weights`` whose gradients have been sent; return its event."""
        ready = [w for w in weights if w.index in self._arrived]
        if not ready:
            return None
        run = self.updates.prepare(ready, "host", [self._host_grads[w.index] for w in ready])
        event = self.device.submit(
            "host",
            run,
            # Gradients arrive after the last computation that may have read the weights in host memory.
            after=[
                *distinct(self._arrived.pop(w.index) for w in ready),
                *distinct(event for w in ready for event in (w.current, w.states.current)),
            ],
            reads=[w.grad_cell for w in ready],
            writes=[cell for w in ready for cell in (w.host_cell, w.states.host_cell)],
            label=label,
            op=op,
            urgency=urgency,
        )
        for weight in ready:
            weight.current = event
            weight.states.current = event
        self.updated += len(ready)
        return event
