"""What becomes of a gradient: held until complete, then used on the device or sent to the host. Knows no steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.execute.departures import GradientOffload, GradientOffloads, Slots
from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.optimizer import Updates
from lt_offload.execute.tensors import Weight, distinct
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import COLLECTED_BELOW


class Gradients:
    """Collects the gradients of a running backward and starts the updates."""

    def __init__(self, device: Device, updates: Updates, weights: Sequence[Weight], plan: Plan) -> None:
        self.device = device
        self.updates = updates
        self.square_sums: list[Tensor] | None = None
        """Squared norms of this iteration's gradients, if somebody asked for them."""
        self.updated = 0
        """Tensors updated so far."""
        self._weights = weights
        self._host_grads: dict[int, Tensor] = {}
        self._direct_grads: dict[int, Tensor] = {}
        """Those of the host gradients that the backward writes itself, as the device sees them."""
        self._slots = Slots(device, plan.ops, weights)
        for outbox in self._slots.of.values():
            self._host_grads.update(outbox.hosts)
        for op in plan.ops:
            if op.payload == "grad" and op.resource == "compute":
                self._receive([weights[t] for t in op.tensors])
        self._arrived: dict[int, Event] = {}
        self._on_device: list[tuple[Weight, Tensor]] = []
        self._to_host: list[tuple[Weight, Tensor]] = []
        self._written: list[Weight] = []
        self._touched: set[int] = set()
        self._expected: set[int] = set()
        """Weights of the block whose backward runs: no other gradients can come."""
        # Through a weak reference: what autograd holds is never collected.
        hook = partial(_call, WeakMethod(self._collect_index))
        trainable = (weight for weight in weights if weight.param.requires_grad)
        self._handles = [w.param.register_post_accumulate_grad_hook(partial(hook, w.index)) for w in trainable]  # type: ignore[no-untyped-call]

    def _receive(self, weights: Sequence[Weight]) -> None:
        """Make host memory for gradients that the backward writes."""
        for weight in weights:
            host = self.device.host_empty(weight.host.shape, weight.host.dtype)
            self._host_grads[weight.index] = host
            self._direct_grads[weight.index] = self.device.zero_copy_view(host)

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
        self._expected.clear()

    def begin_block(self, weights: Sequence[Weight]) -> None:
        """A block's backward begins, which gives ``weights`` gradients, each once."""
        self._expected = {weight.index for weight in weights}

    def _collect_index(self, index: int) -> None:
        weight = self._weights[index]
        if index not in self._expected or index in self._touched:
            weight.param.grad = None
            raise limits.OUTSIDE_USE.error(f"the loss uses {weight.label} outside its block")
        self._collect(weight)

    def _collect(self, weight: Weight) -> None:
        grad = weight.param.grad
        assert grad is not None
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
        if weight.grad_zero_copy:
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
        self._expected.clear()
        self.update_on_device()

    def update_on_device(self) -> None:
        """Update every tensor whose gradient is complete and whose place is the device."""
        items, self._on_device = self._on_device, []
        if not items:
            return
        weights = [weight for weight, _ in items]
        parcels = list(dict.fromkeys(p for w in weights for p in (w.parcel, w.states.parcel) if p is not None))
        self.device.wait(
            *distinct(parcel.ready for parcel in parcels),
            writes=[parcel.buffer for parcel in parcels if parcel.buffer is not None],
        )
        for parcel in parcels:
            parcel.ready = None
        self.updates.update_on_device(weights, [grad for _, grad in items])
        for parcel in parcels:
            parcel.dirty = parcel.buffer is not None
        self.updated += len(items)

    def _write_out(self, weight: Weight, grad: Tensor) -> None:
        """Write a gradient to host memory from the compute lane; nobody keeps it on the device."""
        # The last update, which read the host buffer, is over: the forward has seen the weight that it made.
        self.device.wait(writes=[weight.grad_cell])
        self.device.cross("d2h", grad.nbytes)
        with torch.no_grad():
            self._direct_grads[weight.index].copy_(grad)
        self._written.append(weight)

    def send(self) -> list[tuple[Op, GradientOffload]]:
        """Queue the copies of complete gradients to the host, one task per op; return what they keep alive, by op."""
        if self._written:
            written = self.device.mark()
            self._arrived.update((weight.index, written) for weight in self._written)
            self._written.clear()
        if not self._to_host:
            return []
        items, self._to_host = self._to_host, []
        by_outbox: dict[GradientOffloads, list[tuple[Weight, Tensor]]] = {}
        for item in items:
            by_outbox.setdefault(self._slots.of[item[0].index], []).append(item)
        departures = []
        for outbox, members in by_outbox.items():
            departure = self._slots.send(outbox, members)
            departures.append((outbox.op, departure))
            self._arrived.update((weight.index, departure.event) for weight, _ in members)
        return departures

    def update_on_host(self, weights: Sequence[Weight], label: str, op: int, urgency: int = 0) -> Event | None:
        """Queue the host's update of those ``weights`` whose gradients have been sent; return its event."""
        ready = [w for w in weights if w.index in self._arrived]
        if not ready:
            self._slots.skipped(op, weights)
            return None
        run = self.updates.prepare(ready, "host", [self._host_grads[w.index] for w in ready])
        parcels = list(dict.fromkeys(w.parcel for w in ready))
        event = self.device.submit(
            "host",
            run,
            # Gradients arrive after the last computation that may have read the weights in host memory.
            after=distinct([*(self._arrived.pop(w.index) for w in ready), *(p.current for p in parcels)]),
            reads=list(dict.fromkeys(w.grad_cell for w in ready)),
            writes=[parcel.host_cell for parcel in parcels],
            label=label,
            op=op,
            urgency=urgency,
        )
        self._slots.updated(op, event)
        for parcel in parcels:
            parcel.current = event
        self.updated += len(ready)
        return event


def _call(method: WeakMethod[Any], index: int, param: Tensor) -> None:
    found = method()
    if found is not None:
        found(index)
