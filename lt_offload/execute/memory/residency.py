"""Residents of the device, and the ops that change them: copies of weights and states as the plan says.

One op is one task of a lane. It takes as few copies as there are ranges without a gap in the arena and on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.memory.activations import ActivationOffloader
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.live_group import LiveGroup, complete_on_host, distinct
from lt_offload.execute.memory.snapshots import Snapshots
from lt_offload.execute.memory.tensors import States
from lt_offload.execute.program import Program
from lt_offload.schema.accesses import takes_room
from lt_offload.schema.plan import Op

Pair = tuple[Tensor, Tensor]
"""A range of host memory and one of the arena, of as many bytes."""


class Transfer:
    """Groups that are copied by one task, again and again; remembers the ranges that were copied last."""

    def __init__(self, device: Device, groups: Sequence[LiveGroup], *, label: str, op: int = -1) -> None:
        self.groups = tuple(groups)
        self._device, self._label, self._op = device, label, op
        self._copied: list[tuple[LiveGroup, int, int]] = []
        self._pairs: list[Pair] = []
        self._nbytes = 0

    def fetch(self) -> Event | None:
        """Queue the copies that fill the attached groups; return their event, None if there is nothing to copy."""
        items = [item for item in self.groups if item.buffer is not None and item.filled]
        if not items:
            return None
        event = self._device.submit(
            "h2d",
            _copies(self._device.copy, self._find(items), to_device=True),
            # Former users of the ranges are not named: the device keeps the events with which those were given back,
            # and has whatever writes there wait for them.
            after=complete_on_host(items),
            reads=[item.host_cell for item in items],
            writes=[item.buffer for item in items if item.buffer is not None],
            label=self._label,
            op=self._op,
            nbytes=self._nbytes,
        )
        for item in items:
            item.fetched_by(event)
        return event

    def write_back(self) -> Event | None:
        """Queue the copies of newer device copies to the host; return their event, None if there are none."""
        items = [item for item in self.groups if item.newer_on_device]
        if not items:
            return None
        event = self._device.submit(
            "d2h",
            _copies(self._device.copy, self._find(items), to_device=False),
            # The mark, as the computation that made the copy newer may still run; the others, as tasks may still write
            # the host copy or set it aside.
            after=[self._device.mark(), *distinct([*complete_on_host(items), self._set_aside(items)])],
            reads=[item.buffer for item in items if item.buffer is not None],
            writes=[item.host_cell for item in items],
            label=self._label,
            op=self._op,
            nbytes=self._nbytes,
        )
        for item in items:
            item.written_back_by(event)
        return event

    def _set_aside(self, items: Sequence[LiveGroup]) -> Event | None:
        """Have snapshots set aside what is in the host copies now; return the event, None if nobody wants it.

        On the host's lane: copies to the host may be issued by the thread that launches computations.
        """
        snapshots = items[0].snapshots
        if snapshots is None or not snapshots.wants(tensor for item in items for tensor in item.hosts):
            return None
        tensors = [tensor for item in items for tensor in item.hosts]
        return self._device.submit(
            "host",
            partial(snapshots.changing, tensors),
            after=complete_on_host(items),
            reads=[item.host_cell for item in items],
            label="set aside",
            urgency=-1,
        )

    def forget_views(self) -> None:
        """Let go of the arena."""
        self._copied, self._pairs = [], []

    def _find(self, items: Sequence[LiveGroup]) -> list[Pair]:
        """Return what to copy: as a plan's offsets are fixed, mostly what was copied the last time."""
        wanted = [(item, item.buffer.offset, item.place) for item in items if item.buffer is not None]
        # Views of the ranges are kept from one iteration to the next.
        if wanted != self._copied:
            self._copied, self._pairs = wanted, coalesced(items)
            self._nbytes = sum(host.numel() for host, _ in self._pairs)
        return self._pairs


def coalesced(groups: Sequence[LiveGroup]) -> list[Pair]:
    """Return the ranges of attached ``groups``, where what lies side by side on both sides is one."""
    runs: list[tuple[LiveGroup, LiveGroup]] = []
    for group in sorted(groups, key=_offset):
        if runs and _follows(runs[-1][1], group):
            runs[-1] = (runs[-1][0], group)
        else:
            runs.append((group, group))
    return [_range(first, last) for first, last in runs]


def _offset(group: LiveGroup) -> int:
    assert group.buffer is not None
    return group.buffer.offset


def _follows(one: LiveGroup, other: LiveGroup) -> bool:
    """Return whether ``other`` begins where ``one`` ends, in the arena and in the same mapping of host memory."""
    # Neighbours of different mappings are so by chance, and one copy may not run across their border.
    if one.span is not other.span or _offset(other) != _offset(one) + one.room:
        return False
    return other.host.data_ptr() == one.host.data_ptr() + one.room


def _range(first: LiveGroup, last: LiveGroup) -> Pair:
    assert first.buffer is not None
    nbytes = _offset(last) - _offset(first) + last.nbytes
    with torch.inference_mode(False):
        # These views are kept. If inference mode made them, in a validation, training might not write to them.
        host = first.host.as_strided((nbytes,), (1,), first.host.storage_offset())
        arena = first.buffer.slab[_offset(first) : _offset(first) + nbytes]
    return host, arena


def _copies(copy: Callable[[Tensor, Tensor], None], pairs: Sequence[Pair], *, to_device: bool) -> Callable[[], None]:
    def run() -> None:
        for host, arena in pairs:
            copy(arena, host) if to_device else copy(host, arena)

    return run


class Residency:
    """Moves weights and states as the ops of a plan say.

    A release given to :meth:`release_at` runs at the end of that step, in this iteration or the next. ``adopt`` lets
    the host copies of a group be what the optimizer holds now, before they are copied to the device.
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        program: Program | None,
        snapshots: Snapshots,
        adopt: Callable[[LiveGroup], None] | None,
    ) -> None:
        self.device = device
        self.snapshots = snapshots
        self._adopt = adopt
        self.settled = False
        """What is on the device is what the plan wants at the start of step 0: no range was taken or given back out of
        plan since, and no pass broke off."""
        self.all: list[LiveGroup] = layout.all
        for group in self.all:
            group.snapshots = self.snapshots
        self._releases: dict[int, list[Callable[[], None]]] = {}
        self._initial: dict[LiveGroup, int] = {}
        self._transfers: list[Transfer] = []
        self.moves: dict[int, Callable[[], None]] = {}
        """By op: what carries out a prefetch, offload or drop of weights, states or sums of gradients."""
        if program is not None:
            self._initial = _placed([(copy.group, copy.offset) for copy in program.initial], layout)
            self.moves = {op.id: self._move(op, layout) for op in program.moves}

    def prefetch(self, places: Sequence[tuple[LiveGroup, int]], transfer: Transfer) -> None:
        """Take the ranges of the arena that an op names, and queue the copies that fill them."""
        for group, offset in places:
            self._attach(group, offset)
        transfer.fetch()

    def _write_back(self, groups: Sequence[LiveGroup], transfer: Transfer, release_after: int | None) -> None:
        transfer.write_back()
        if release_after is not None:
            self.release_at(release_after, partial(_drop, groups))

    def leave(self, op: Op, offloader: ActivationOffloader) -> None:
        """Carry out the offload of a block's activations."""
        event = offloader.leave(op.id)
        if event is not None:
            self.release_at(op.step if op.release_after is None else op.release_after, offloader.released)

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
        self.run_releases()
        # First what leaves: its ranges may be those that something else is wanted at.
        self.evict(keep=self._initial)
        missing = [group for group in self._initial if group.buffer is None]
        for group in missing:
            self._attach(group, self._initial[group])
        Transfer(self.device, missing, label="settle").fetch()
        self.settled = True

    def evict(self, keep: Mapping[LiveGroup, int] | None = None) -> None:
        """Bring every device copy to the host and forget it, except those in ``keep`` at the offset given there."""
        out = [p for p in self.all if p.buffer is not None and (keep or {}).get(p) != p.buffer.offset]
        Transfer(self.device, out, label="evict").write_back()
        for group in out:
            group.detach()
        self.settled = False

    def complete_host(self) -> None:
        """Write newer device copies back, keeping them, and wait until every host copy is complete."""
        Transfer(self.device, self.all, label="write back").write_back()
        self.device.drain()
        for group in self.all:
            group.awaited_on_host()

    def bring_home(self, groups: Iterable[LiveGroup]) -> None:
        """Make the host copies of ``groups`` complete, wait until they are, and keep the device copies."""
        incomplete = [group for group in groups if not group.complete_on_host]
        if not incomplete:
            return
        Transfer(self.device, incomplete, label="read").write_back()
        self.device.synchronize(*complete_on_host(incomplete))
        for group in incomplete:
            group.awaited_on_host()

    def forget(self, groups: Iterable[LiveGroup] | None = None) -> None:
        """Forget the device copies of ``groups``, or all, without writing them back.

        Nothing that the device has been given reads or writes their host copies any more afterwards.
        """
        self.run_releases()
        self.device.drain()
        # And computations, which may read host copies directly, beside the lanes' tasks.
        self.device.synchronize(self.device.mark())
        for group in self.all if groups is None else groups:
            if group.buffer is not None:
                group.give_up()
            # Mostly because host copies are about to be written.
            for total in group.sums:
                total.norm = None
        self.settled = False

    def close(self) -> None:
        """Let go of everything on the device, and of snapshots that have not been read; the host copies are complete.

        Nothing of it is left to Python's collector of cycles: until that comes, the next run would not find the memory.
        """
        self.snapshots.end()
        self._releases.clear()
        for group in self.all:
            if group.buffer is not None:
                group.give_up()
            for member in group.members:
                member.forget_views()
        for transfer in self._transfers:
            transfer.forget_views()

    def _move(self, op: Op, layout: Layout) -> Callable[[], None]:
        offsets = _placed(list(zip(op.groups, op.offsets or (0,) * len(op.groups), strict=True)), layout)
        groups = tuple(offsets)
        if not takes_room(op) and op.lane != "d2h":
            return partial(_drop, groups)
        transfer = Transfer(self.device, groups, label=f"{op.kind} {op.payload} {op.block}", op=op.id)
        self._transfers.append(transfer)
        if takes_room(op):
            return partial(self.prefetch, tuple(offsets.items()), transfer)
        return partial(self._write_back, groups, transfer, op.release_after)

    def _attach(self, group: LiveGroup, offset: int) -> None:
        # Before it has a device copy: states that the optimizer has replaced are adopted on the host.
        if isinstance(group.members[0], States):
            assert self._adopt is not None
            self._adopt(group)
        group.attach(self.device.place(offset, group.room, group.label))


def _drop(groups: Sequence[LiveGroup]) -> None:
    for group in groups:
        group.detach()


def _placed(planned: Sequence[tuple[int, int]], layout: Layout) -> dict[LiveGroup, int]:
    """Return where each group begins, given where the groups of the plan do."""
    return {group: offset + start for number, offset in planned for group, start in layout.parts[number]}
