"""What is on the device, and the ops that change it. Knows the plan's offsets and release times; runs no block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lt_offload.execute.activations import Pager
from lt_offload.execute.device import Device
from lt_offload.execute.params import States, Weight, fetch, round_up, write_back
from lt_offload.execute.updates import Updates
from lt_offload.plan.schedule import ALIGNMENT, Op, Plan


class Residency:
    """Moves weights and states as the ops of a plan say.

    A release given to :meth:`release_at` runs at the end of that step, in this iteration or the next.
    """

    def __init__(self, device: Device, weights: Sequence[Weight], plan: Plan | None, updates: Updates | None) -> None:
        self.device = device
        self.weights = weights
        self.plan = plan
        self.updates = updates
        self.settled = False
        """What is on the device is what the plan wants at the start of step 0."""
        self._releases: dict[int, list[Callable[[], None]]] = {}

    def issue(self, op: Op) -> None:
        """Carry out a prefetch, offload or drop of weights or states."""
        copies = self._copies(op)
        label = f"{op.kind} {op.payload} {op.block}"
        if op.kind == "prefetch":
            for item, offset in zip(copies, op.offsets, strict=True):
                self._attach(item, offset)
            fetch(self.device, copies, label=label, op=op.id)
        elif op.kind == "offload":
            write_back(self.device, copies, label=label, op=op.id)
            if op.until is not None:
                for item in copies:
                    self.release_at(op.until, item.detach)
        else:
            for item in copies:
                assert not item.dirty, f"{item.label} would be lost"
                item.detach()

    def leave(self, op: Op, pager: Pager) -> None:
        """Carry out the offload of a block's activations."""
        event = pager.leave(op.id)
        if event is not None:
            self.release_at(op.step if op.until is None else op.until, pager.released)

    def release_at(self, step: int, release: Callable[[], None]) -> None:
        """Call ``release`` at the end of ``step``."""
        self._releases.setdefault(step, []).append(release)

    def end_step(self, step: int) -> None:
        """Run the releases of ``step``."""
        for release in self._releases.pop(step, ()):
            release()

    def run_releases(self) -> None:
        """Run every release now."""
        for step in sorted(self._releases):
            self.end_step(step)

    def settle(self) -> None:
        """Bring exactly what the plan wants at the start of step 0, where it wants it."""
        assert self.plan is not None
        self.run_releases()
        wanted: dict[tuple[str, int], int] = {(r.payload, r.tensor): r.offset for r in self.plan.initial}
        self.evict(keep=wanted)
        missing: list[Weight | States] = []
        for (payload, tensor), offset in wanted.items():
            item = self._copy(payload, tensor)
            if item.buffer is None:
                self._attach(item, offset)
                missing.append(item)
        fetch(self.device, missing, label="settle")
        self.settled = True

    def evict(self, keep: Mapping[tuple[str, int], int] | None = None) -> None:
        """Bring every device copy to the host and forget it, except those in ``keep`` at the offset given there."""
        out = [
            item
            for item in self.all()
            if item.buffer is not None and (keep or {}).get(_key(item)) != item.buffer.offset
        ]
        write_back(self.device, out, label="evict")
        for item in out:
            item.detach()
        self.settled = False

    def complete_host(self) -> None:
        """Write newer device copies back, keeping them, and wait until every host copy is complete."""
        write_back(self.device, self.all(), label="write back")
        self.device.drain()
        for item in self.all():
            item.current = None

    def forget(self) -> None:
        """Forget every device copy without writing it back."""
        self.run_releases()
        self.device.drain()
        for item in self.all():
            if item.buffer is not None:
                item.detach()
        self.settled = False

    def all(self) -> list[Weight | States]:
        """Return every weight and every weight's states."""
        return [item for weight in self.weights for item in (weight, weight.states)]

    def _copy(self, payload: str | None, tensor: int) -> Weight | States:
        weight = self.weights[tensor]
        return weight if payload == "weight" else weight.states

    def _copies(self, op: Op) -> list[Weight | States]:
        return [self._copy(op.payload, tensor) for tensor in op.tensors]

    def _attach(self, item: Weight | States, offset: int) -> None:
        assert self.plan is not None
        assert self.updates is not None
        nbytes = item.nbytes
        if isinstance(item, States):
            item.refresh(self.updates.state(item.weight))
            nbytes = max(self.plan.state_bytes[item.weight.index], item.nbytes)
        item.attach(self.device.place(offset, round_up(nbytes, ALIGNMENT), item.label))


def _key(item: Weight | States) -> tuple[str, int]:
    return ("weight", item.index) if isinstance(item, Weight) else ("state", item.weight.index)
