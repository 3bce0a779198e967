"""A tensor group as it is now, and the only owner of which of its copies is newer: rules of coherence.

A group has a host copy and at most one device copy. These hold, whatever the plan:

1. **One copy is the newest, or both are the same.** A device copy that is newer (:attr:`LiveGroup.newer_on_device`) is
   written back or given up by name (:meth:`LiveGroup.give_up`); nobody fetches over it, drops it, or reads or updates
   the host copy meanwhile. A device copy that the host has overtaken is only dropped, or fetched again.
2. **Whoever reads or writes the host copy comes after** the event of its last writer (:func:`complete_on_host`); None:
   that is over. On the host, updates also come after the last computation and the last fetch that read it: a
   gradient, which every update waits for, arrives after both; where none arrives, ``Gradients`` waits for them.
3. **Whoever reads or writes the device copy comes after** :attr:`LiveGroup.device_ready`, the copy that fills it. A
   computation waits for it once (:func:`needed_by_compute`): the compute lane is ordered after it for good. The range
   is given back with the copies in and out, after which its next writer comes.
4. **Whoever writes a host copy says so first** (:meth:`LiveGroup.about_to_write`, ``Snapshots.changing``), so that a
   snapshot that is being read keeps what is there. Four do: users' writes in the guard, updates on the host in their
   task, copies to the host by a task before them (``Transfer.write_back``), states that an optimizer has replaced.
5. **The plan's ops follow each other from the plan's start** (``Residency.settled``): what takes or gives back ranges
   out of plan (streamed forwards, evictions, an iteration that broke off) says so, and the next pass settles first.

The fields are written by the methods that are named after what has happened, and by nothing else. The methods check 1
and 5; tests run on a device (``tests/support/hostile``) that verifies 2 and 3 by a happens-before checker, and 4
after every task that writes a :class:`HostCopy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lt_offload.errors import PlanError
from lt_offload.execute.device.base import Buffer, Cell, Device, Event
from lt_offload.execute.memory.snapshots import Snapshots
from lt_offload.execute.memory.tensors import Member, States, Sum, Weight
from lt_offload.schema.plan import ALIGNMENT
from lt_offload.units import round_up


class HostCopy(Cell):
    """The host copy of ``group``, as whoever orders accesses sees it."""

    __slots__ = ("group",)

    def __init__(self, group: LiveGroup) -> None:
        super().__init__(f"host {group.label}")
        self.group = group


class LiveGroup:
    """A tensor group as it is: a host copy, an optional device copy, and the events that say when each is complete.

    Where a user holds the memory of a weight (a state dict that was kept), that weight is a live group of its own.
    """

    __slots__ = (
        "device_ready",
        "_host_ready",
        "_common",
        "last_fetch",
        "_leaving",
        "newer_on_device",
        "_overtaken",
        "_own",
        "buffer",
        "device",
        "host",
        "host_cell",
        "label",
        "members",
        "nbytes",
        "place",
        "room",
        "snapshots",
        "span",
    )

    def __init__(self, members: Sequence[Member], device: Device) -> None:
        self.members: tuple[Member, ...] = tuple(members)
        self.device = device
        self.label = members[0].label + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        self.host: Tensor
        """The bytes of all host copies."""
        self.span: Tensor
        """The host memory of all groups that are fetched together; ``host`` is part of it."""
        self.place = 0
        """Changes when ``host`` does."""
        self._common: tuple[Tensor, Tensor] | None = None
        self._own: tuple[Tensor, Tensor] | None = None
        self.host_cell = HostCopy(self)
        self.snapshots: Snapshots | None = None
        """The snapshots of which the host copy may be a part."""
        self.buffer: Buffer | None = None
        """The device copy."""
        self.device_ready: Event | None = None
        """Event that completes the device copy; None: the compute lane is ordered after that, or there is none."""
        self.last_fetch: Event | None = None
        """The last copy from the host copy to the device."""
        self._leaving: Event | None = None
        """The last copy from the device copy to the host."""
        self._host_ready: Event | None = None
        """Event that completes the host copy; None: it is complete."""
        self.newer_on_device = False
        """The device copy is newer than the host copy."""
        self._overtaken = False
        """The device copy is older than the host copy."""
        start = 0
        for member in self.members:
            member.group, member.start = self, start
            # The plan counts sizes in these multiples, so members stand in the group as they do in the plan's.
            start += round_up(member.room, ALIGNMENT)
        self.room = start
        """Bytes that it takes of the arena."""
        self.nbytes = self.members[-1].start + self.members[-1].room
        """Bytes that are copied."""

    # -- what is where -----------------------------------------------------------------------------------------------

    @property
    def complete_on_host(self) -> bool:
        """True if the host copy has the newest values by now."""
        return not self.newer_on_device and self._host_ready is None

    @property
    def filled(self) -> bool:
        """True if there is anything to copy; states appear with the first update, sums with the first gradient."""
        return isinstance(self.members[0], Weight) or any(member.filled for member in self.members)

    @property
    def hosts(self) -> list[Tensor]:
        """The host copies that checkpoints hold: none of sums."""
        return [host for member in self.members for host in member.hosts]

    @property
    def weights(self) -> list[Weight]:
        """Its members, if they are weights."""
        return [member for member in self.members if isinstance(member, Weight)]

    @property
    def sums(self) -> list[Sum]:
        """Its members, if they are sums of gradients."""
        return [member for member in self.members if isinstance(member, Sum)]

    # -- what happens to it ------------------------------------------------------------------------------------------

    def attach(self, buffer: Buffer) -> None:
        """Use ``buffer`` for the device copy."""
        assert self.buffer is None, f"{self.label} is on the device already"
        self.buffer = buffer
        for member in self.members:
            at = buffer.offset + member.start
            member.view = member.views[at] if at in member.views else member.view_at(buffer.slab, at)

    def fetched_by(self, event: Event) -> None:
        """A copy to the device has been queued: both copies are the same after ``event``."""
        assert not self.newer_on_device, f"{self.label} would be overwritten by an older copy"
        self.device_ready = self.last_fetch = event
        self._overtaken = False

    def changed_on_device(self) -> None:
        """The compute lane has changed the device copy, if there is one: it is newer now."""
        # Otherwise two copies would each have a change that the other lacks.
        assert not self._overtaken, f"{self.label} was changed on the device, where it is out of date"
        self.newer_on_device = self.buffer is not None

    def written_back_by(self, event: Event) -> None:
        """A copy to the host has been queued: both copies are the same after ``event``."""
        self._host_ready = self._leaving = event
        self.newer_on_device = False

    def updated_on_host_by(self, event: Event) -> None:
        """A task that changes the host copy has been queued: that is newer after ``event``."""
        # The same from the host's side.
        assert not self.newer_on_device, f"{self.label} was changed on the host, where it is out of date"
        self._host_ready = event
        self._overtaken = self.buffer is not None

    def awaited_on_host(self) -> None:
        """The caller has waited until the host copy was complete."""
        self._host_ready = None

    def empty(self) -> None:
        """Nothing in it counts any more, wherever it is: sums that have been used."""
        self.newer_on_device = False

    def detach(self) -> None:
        """Drop the device copy, which is no newer, and give its range back; its next writer waits for the copies."""
        assert not self.newer_on_device, f"{self.label} would be lost"
        self.give_up()

    def give_up(self) -> None:
        """Drop the device copy, newer or not: the host copy counts."""
        assert self.buffer is not None
        # Copies only: `free` itself orders the next writer after the computations so far.
        copies = {self.device_ready: None, self._leaving: None}
        self.device.free(self.buffer, [event for event in copies if event is not None])
        self.buffer = self.device_ready = self._leaving = None
        self.newer_on_device = self._overtaken = False
        for member in self.members:
            member.view = member.absent

    def about_to_write(self, tensors: Iterable[Tensor] | None = None) -> None:
        """The calling thread, or the task that runs, is about to write host copies: ``tensors`` of them, or all."""
        if self.snapshots is not None:
            self.snapshots.changing(self.hosts if tensors is None else tensors)

    # -- memory that processes have in common (``memory/common.py``) -------------------------------------------------

    def stand_in_common(self, common: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> None:
        """Its host copies are in memory that processes have in common: bytes of it and of its span, twice mapped."""
        self._common, self._own = common, own
        self.read_common()

    def read_own(self) -> None:
        """Copy to the device from this process's own pages from now on, where a user has written."""
        assert self._own is not None
        (self.host, self.span), self.place = self._own, self.place + 1

    @property
    def reads_own(self) -> bool:
        """True after :meth:`read_own`, until it is read from common memory again."""
        return self._own is not None and self.host is self._own[0]

    def read_common(self) -> None:
        """Copy from the common memory."""
        assert self._common is not None
        (self.host, self.span), self.place = self._common, self.place + 1

    # -- states that come and go -------------------------------------------------------------------------------------

    def unchanged(self, state: Callable[[Weight], dict[str, Any]]) -> bool:
        """Return whether the states that the optimizer has now, as ``state`` says, are the known ones."""
        return all(member.unchanged(state(member.weight)) for member in self.members if isinstance(member, States))

    def refresh(self, state: Callable[[Weight], dict[str, Any]]) -> int:
        """Adopt the states that the optimizer has now, as ``state`` says; return how many members have other memory."""
        return sum(member.refresh(state(member.weight)) for member in self.members if isinstance(member, States))


def distinct(events: Iterable[Event | None]) -> list[Event]:
    """Return the distinct events; tensors that travel together share one."""
    return [event for event in dict.fromkeys(events) if event is not None]


def complete_on_host(groups: Iterable[LiveGroup]) -> list[Event]:
    """Return the distinct events that complete the host copies of ``groups``."""
    return [event for event in {group._host_ready: None for group in groups} if event is not None]


def needed_by_compute(
    device: Device,
    groups: Sequence[LiveGroup],
    in_host_memory: Sequence[LiveGroup] = (),
    *,
    by: str,
    write: bool = False,
) -> None:
    """Order the compute lane after what completes the copies that it goes on to read.

    ``by`` is what reads them, for errors; ``write``: it writes those on the device, too. Raises ``PlanError`` if the
    plan has not brought one there, or it is out of date there.
    """
    events: dict[Event, None] = {}
    on_device: list[Cell] = []
    on_host: list[Cell] = []
    for group in groups:
        if group.buffer is None:
            raise PlanError(f"the plan does not bring {group.label} to the device for {by}")
        if group._overtaken:
            raise PlanError(f"{by} reads {group.label} on the device, which is older than the host copy")
        on_device.append(group.buffer)
        if group.device_ready is not None:
            events[group.device_ready] = None
    for group in in_host_memory:
        if group.newer_on_device:
            raise PlanError(f"{by} reads {group.label} in host memory, which is older than the device copy")
        on_host.append(group.host_cell)
        if group._host_ready is not None:
            events[group._host_ready] = None
    device.wait(*events, reads=on_host if write else [*on_device, *on_host], writes=on_device if write else ())
    for group in groups:
        group.device_ready = None  # the compute lane is ordered after it for good


def needed_by_caller(device: Device, groups: Sequence[LiveGroup]) -> None:
    """Order the calling thread, which reads and writes ``groups`` where they are, after whatever fills them."""
    here = [group for group in groups if group.buffer is not None]
    device.wait(
        *distinct(group.device_ready for group in here), writes=[g.buffer for g in here if g.buffer is not None]
    )
    at_home = [group for group in groups if group.buffer is None]
    device.synchronize(*complete_on_host(at_home))
    for group in at_home:
        group.awaited_on_host()
