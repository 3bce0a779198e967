"""What is on the device, and the ops that change it. Knows the plan's offsets and release times; runs no block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lt_offload.execute.activations import ActivationOffloader
from lt_offload.execute.device.base import Device
from lt_offload.execute.groups import Layout, Parcel
from lt_offload.execute.optimizer import Updates
from lt_offload.execute.tensors import distinct
from lt_offload.execute.transfers import Transfer
from lt_offload.schema.plan import Op, Plan


@dataclass(frozen=True, slots=True)
class _Move:
    """An op on weights or states, made ready."""

    parcels: tuple[Parcel, ...]
    offsets: tuple[int, ...]
    """Where each goes, for prefetches."""
    transfer: Transfer


class Residency:
    """Moves weights and states as the ops of a plan say.

    A release given to :meth:`release_at` runs at the end of that step, in this iteration or the next.
    """

    def __init__(self, device: Device, layout: Layout, plan: Plan | None, updates: Updates | None) -> None:
        self.device = device
        self.plan = plan
        self.updates = updates
        self.settled = False
        """What is on the device is what the plan wants at the start of step 0."""
        self.all: list[Parcel] = layout.all
        self._releases: dict[int, list[Callable[[], None]]] = {}
        self._initial: dict[Parcel, int] = {}
        self._moves: dict[int, _Move] = {}
        if plan is not None:
            self._initial = _placed([(copy.group, copy.offset) for copy in plan.initial], layout)
            self._moves = {op.id: self._move(op, layout) for op in plan.ops if op.payload in ("weight", "state")}

    def issue(self, op: Op) -> None:
        """Carry out a prefetch, offload or drop of weights or states."""
        move = self._moves[op.id]
        if op.kind == "prefetch":
            for parcel, offset in zip(move.parcels, move.offsets, strict=True):
                self._attach(parcel, offset)
            move.transfer.fetch()
        elif op.kind == "offload":
            move.transfer.write_back()
            if op.release_after is not None:
                for parcel in move.parcels:
                    self.release_at(op.release_after, parcel.detach)
        else:
            for parcel in move.parcels:
                assert not parcel.dirty, f"{parcel.label} would be lost"
                parcel.detach()

    def leave(self, op: Op, pager: ActivationOffloader) -> None:
        """Carry out the offload of a block's activations."""
        event = pager.leave(op.id)
        if event is not None:
            self.release_at(op.step if op.release_after is None else op.release_after, pager.released)

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
        self.evict(keep=self._initial)
        missing = [parcel for parcel in self._initial if parcel.buffer is None]
        for parcel in missing:
            self._attach(parcel, self._initial[parcel])
        Transfer(self.device, missing, label="settle").fetch()
        self.settled = True

    def evict(self, keep: Mapping[Parcel, int] | None = None) -> None:
        """Bring every device copy to the host and forget it, except those in ``keep`` at the offset given there."""
        out = [p for p in self.all if p.buffer is not None and (keep or {}).get(p) != p.buffer.offset]
        Transfer(self.device, out, label="evict").write_back()
        for parcel in out:
            parcel.detach()
        self.settled = False

    def complete_host(self) -> None:
        """Write newer device copies back, keeping them, and wait until every host copy is complete."""
        Transfer(self.device, self.all, label="write back").write_back()
        self.device.drain()
        for parcel in self.all:
            parcel.current = None

    def bring_home(self, parcels: Iterable[Parcel]) -> None:
        """Make the host copies of ``parcels`` complete, wait until they are, and keep the device copies."""
        incomplete = [parcel for parcel in parcels if parcel.dirty or parcel.current is not None]
        if not incomplete:
            return
        Transfer(self.device, incomplete, label="read").write_back()
        self.device.synchronize(*distinct(parcel.current for parcel in incomplete))
        for parcel in incomplete:
            parcel.current = None

    def forget(self, parcels: Iterable[Parcel] | None = None) -> None:
        """Forget the device copies of ``parcels``, or all, without writing them back.

        Nothing that the device has been given reads or writes their host copies any more afterwards.
        """
        self.run_releases()
        self.device.drain()
        self.device.synchronize(self.device.mark())
        for parcel in self.all if parcels is None else parcels:
            if parcel.buffer is not None:
                parcel.detach()
        self.settled = False

    def close(self) -> None:
        """Let go of the arena."""
        for parcel in self.all:
            for member in parcel.members:
                member.forget_views()
        for move in self._moves.values():
            move.transfer.forget_views()

    def _move(self, op: Op, layout: Layout) -> _Move:
        assert op.payload is not None
        offsets = _placed(list(zip(op.groups, op.offsets or (0,) * len(op.groups), strict=True)), layout)
        parcels = tuple(offsets)
        transfer = Transfer(self.device, parcels, label=f"{op.kind} {op.payload} {op.block}", op=op.id)
        return _Move(parcels, tuple(offsets.values()), transfer)

    def _attach(self, parcel: Parcel, offset: int) -> None:
        assert self.updates is not None
        parcel.refresh(self.updates)
        parcel.attach(self.device.place(offset, parcel.room, parcel.label))


def _placed(groups: Sequence[tuple[int, int]], layout: Layout) -> dict[Parcel, int]:
    """Return where each parcel begins, given where groups of the plan do."""
    return {parcel: offset + start for group, offset in groups for parcel, start in layout.parts[group]}
