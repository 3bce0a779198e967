"""What becomes of a gradient: held until complete, then used on the device or sent to the host. Knows no steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.errors import PlanError
from lt_offload.execute.departures import GradientOffload, Slots
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
        self._slots = Slots(device, plan, weights)
        for box in self._slots.of.values():
            self._host_grads.update(box.hosts)
        self._taker = _takers(plan, weights)
        for op in plan.ops:
            if op.writes_gradients:
                self._receive([weights[t] for t in plan.tensors(op)])
        self._arrived: dict[int, Event] = {}
        self._complete: defaultdict[int, list[tuple[Weight, Tensor]]] = defaultdict(list)
        """By op that takes them: complete gradients."""
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
            self._direct_grads[weight.index] = self.device.direct_view(host)

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
        self._complete.clear()
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
            self._completed(weight)

    def _completed(self, weight: Weight) -> None:
        """Give a complete gradient to the op that takes it."""
        grad, weight.grad, weight.seen = weight.grad, None, 0
        if grad is None:
            return
        if self.square_sums is not None:
            self.square_sums.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square_())
        op = self._taker[weight.index]
        if op.writes_gradients:
            self._write_out(weight, grad)
            return
        self._complete[op.id].append((weight, grad))
        if op.kind == "update" and grad.nbytes >= COLLECTED_BELOW:
            self.update_on_device()  # at once, so that the memory of a large gradient is free again

    def end_block(self, weights: Sequence[Weight]) -> None:
        """Count the uses that gave no gradient, and update what is left of the block on the device."""
        for weight in weights:
            if weight.param.requires_grad and weight.index not in self._touched:
                weight.seen += 1
                if weight.seen == weight.uses:
                    self._completed(weight)
        self._touched.clear()
        self._expected.clear()
        self.update_on_device()

    def update_on_device(self) -> None:
        """Carry out the updates on the device for every tensor whose gradient is complete."""
        updates = [op for op in self._complete if op not in self._slots.of]
        items = [item for op in updates for item in self._complete.pop(op)]
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
        sent = []
        for op in list(self._complete):
            box, members = self._slots.of[op], self._complete.pop(op)
            offload = self._slots.send(box, members)
            sent.append((box.op, offload))
            self._arrived.update((weight.index, offload.event) for weight, _ in members)
        return sent

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


def _takers(plan: Plan, weights: Sequence[Weight]) -> dict[int, Op]:
    """Return, by trainable tensor, the op that takes its gradient: an offload, or an update on the device.

    Raises:
        PlanError: if there is none, so that the tensor would never be updated.
    """
    takers = {
        tensor: op
        for op in plan.ops
        if op.payload == "grad" or (op.kind == "update" and not op.updates_on_host)
        for tensor in plan.tensors(op)
    }
    for weight in weights:
        if weight.param.requires_grad and weight.index not in takers:
            raise PlanError(f"no op of the plan takes the gradient of {weight.label}; plan again")
    return takers


def _call(method: WeakMethod[Any], index: int, param: Tensor) -> None:
    found = method()
    if found is not None:
        found(index)
