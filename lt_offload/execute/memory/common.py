"""Host memory that all processes of a machine have in common: one host copy of each weight, however many they are.

Frozen weights are read by all and written by nobody. A weight that is updated on the host has an *owner*, one of the
processes: it alone updates the host copy, and it alone computes optimizer states (``updates/common_states.py``).
Weights that are updated on a device stay every process's own, and so do those whose memory a user holds.

Each process maps the memory twice (``machine.pages.py``). The engine copies from the *common* mapping, and
owners update there. What users see, and what ``Parameter.data`` is at rest, is the process's *own* mapping of the same
pages: a write stays in this process, so that an operation in place which every process carries out happens once in
each. Such a weight is read from the own mapping from then on, until all processes meet (:meth:`Common.publish`):
the owner copies what it has written to the common memory, and all forget their own pages. That is before the next
forward with gradients and before updates. These rules hold:

1. Nobody writes the common memory but owners: in their updates, and in :meth:`Common.publish`.
2. An update begins when no process reads its host copies any more: all updates that wait for all gradients
   (:meth:`Common.begin_updates`), others when every process has said so (``updates/arrivals.py``). Whoever reads one
   afterwards comes after its owner's update: the event of the group waits for that (:meth:`Common.updated`).
3. Before a user writes, all updates are over: a page that is written has neighbours of the same moment.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.errors import PlanError
from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.device.lanes import GaveUp, plain_torch
from lt_offload.execute.memory.host_task import HostTask
from lt_offload.execute.memory.live_group import LiveGroup, distinct
from lt_offload.execute.memory.tensors import Member, Sum, Weight, carve
from lt_offload.execute.program import Program
from lt_offload.machine.pages import SharedPages, drop_own, make_file, spread
from lt_offload.schema.plan import Plan

if TYPE_CHECKING:
    from lt_offload.distributed.peers import Peers
    from lt_offload.distributed.ranks import Ranks

UPDATE = "an update of weights"
"""The place of a process, for the others."""
_MOVED_AT_ONCE = 256 << 20
"""Bytes of weights that are in common memory and in everybody's, while they move there."""
_FIRST_POLL_S, _LONGEST_POLL_S = 2e-5, 1e-3
_WORDS = 128
"""Words of eight bytes in a row, whose sum is one number."""
_WRITTEN, _REPLACED, _EDITED = 1, 2, 4
"""Statements of a process about a weight: a user has written it or its states; its states are others than the common
ones; a user has written its gradient, which is that of all."""
_DONE = {
    _WRITTEN: "{} was written",
    _REPLACED: "{} was given other optimizer states",
    _EDITED: "the gradient of {} was written",
}
"""Actions that are refused if only some processes have done them."""


class StatesInCommon(Protocol):
    """The optimizer states of weights in common memory."""

    def replaced(self, weight: Weight) -> bool:
        """Return whether its states are not those in common memory, or not there yet."""
        ...

    def pairs(self, weight: Weight) -> list[tuple[Tensor, Tensor]]:
        """Return its states: in common memory, and as users see them."""
        ...


def contents(rows: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return a number of what is in each of ``rows``; reading it where it is costs little more."""
    totals = []
    for tensors in rows:
        total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
        for tensor in tensors:
            read = tensor.detach().contiguous().view(-1).view(torch.uint8)
            whole = read.numel() - read.numel() % (8 * _WORDS) if read.storage_offset() % 8 == 0 else 0
            # Sums of rows, each times another number: rows that change places change it.
            words = read[:whole].view(torch.int64).view(-1, _WORDS).sum(1)
            for row in (words, read[whole:].long()):
                total = 31 * total + (row * (2 * torch.arange(row.numel(), device=row.device) + 1)).sum()
        totals.append(total)
    numbers: list[int] = torch.stack(totals).tolist() if totals else []
    return numbers


def check_alike(labels: Sequence[str], told: Sequence[Sequence[int]]) -> None:
    """Check that all processes ``told`` the same :func:`contents` of what has these ``labels``; or say which not."""
    first, *others = told
    for at, label in enumerate(labels):
        for rank, row in enumerate(others, 1):
            if row[at] != first[at]:
                raise limits.ONE_PROCESS.error(f"{label} has other values in process {rank} than in process 0")


def share_out(sizes: Sequence[int], count: int) -> list[int]:
    """Return which of ``count`` processes owns each of some tensors: the largest first, to whoever has least."""
    held, owners = [0] * count, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = held.index(min(held))
        held[owners[index]] += sizes[index]
    return owners


def check_beside(plan: Plan, *, in_place: bool = True, machines: int = 1) -> None:
    """Check that updates of ``plan``, which do not wait, can use the gradients of several processes.

    ``in_place``: updates write the optimizer states that are there. Raises ``PlanError`` if not.
    """
    why = None
    if machines > 1:
        why = "there are several machines"
    elif not in_place:
        why = "the optimizer makes new states in each step"
    elif any(place not in ("host", "none") for place in plan.update_places):
        why = "it updates weights on the device"
    elif any(op.rows is not None or op.writes_gradients for op in plan.ops):
        why = "it takes gradients of a table apart, or lets the backward write them"
    if why is not None:
        raise PlanError(
            f"its updates do not wait for the gradients of all processes, and {why}; plan again with as many devices"
        )


def map_common(machine: Peers, sizes: Sequence[int], by: int, *, name: str) -> list[SharedPages]:
    """Return memory of these ``sizes`` that process ``by`` makes, as ``name``, and all map, zeroed."""
    starts, total = spread(list(sizes))
    descriptor = machine.share_file(lambda: make_file(total, name), by)
    try:
        parts = [SharedPages(fd=descriptor, start=at, nbytes=size) for at, size in zip(starts, sizes, strict=True)]
        for part in parts:
            part.map()
    finally:
        os.close(descriptor)
    return parts


class Common:
    """The host copies of one engine's weights that are in common memory.

    Without a ``program`` forwards are streamed only. ``staying`` are weights that stay where they are in this process.
    ``owned_updates``: the optimizer's updates write the states that are there, in place. Raises ``PlanError`` if
    updates of ``program`` would have to wait for the gradients of all processes, and do not.
    """

    def __init__(
        self,
        others: Ranks,
        device: Device,
        weights: Sequence[Weight],
        program: Program | None,
        staying: Iterable[int],
        *,
        owned_updates: bool,
    ) -> None:
        self.machine, self._others, self._device = others.machine, others, device
        self.staying = {index for of_one in others.gather(sorted(staying)) for index in of_one}
        """Weights that stay where they are, in any process."""

        def fits(weight: Weight) -> bool:
            on_host = program is None or (owned_updates and weight.index in program.updated_on_host)
            shared = on_host or not weight.param.requires_grad
            return shared and weight.nbytes > 0 and weight.index not in self.staying

        self._all = weights
        self.weights = [weight for weight in weights if fits(weight)]
        owners = share_out([w.nbytes for w in self.weights], self.machine.size)
        for weight, owner in zip(self.weights, owners, strict=True):
            weight.owner = owner
        trains = program is not None
        self._beside = program is not None and not program.delayed
        """Updates run beside the backward."""
        self.trained = [weight for weight in self.weights if trains and weight.param.requires_grad]
        """The weights that have an owner's updates."""
        self.nbytes = 0
        """Bytes in common memory, of all processes: host copies and states, which are there once, and gradients."""
        self.states: StatesInCommon | None = None
        """The optimizer's states of them, in an engine that updates."""
        self._spans: list[list[LiveGroup]] = []
        self._written: set[int] = set()
        """By index: weights that a user has written here since all processes have met."""
        self.edited: set[int] = set()
        """Weights whose gradients users have written since those of all were added up."""
        self._round = 0
        self._ops = program.size if program is not None else 0
        self._done: Any = None
        """By process and op: the round of updates in which the process has last carried out its part; of what machines
        add up, the window. Behind that, by op, the round for which its gradients have arrived, and then, by weight,
        that in which it has last had one."""
        if trains:
            size, columns = self.machine.size, 2 * self._ops + len(weights)
            (pages,) = map_common(self.machine, [8 * size * columns], by=0, name="counters")
            # NumPy's stores of aligned numbers of 8 bytes are one access each.
            self._done = pages.common.view(torch.int64, size * columns, 0).numpy().reshape(size, columns)

    # -- moving in ---------------------------------------------------------------------------------------------------

    def takes(self, group: LiveGroup) -> bool:
        """Return whether ``group`` stands in common memory."""
        if self._beside and group.sums:  # all processes read them, whoever updates the weights
            return True
        return all(_weight(member) is not None and _weight(member).owner is not None for member in group.members)  # type: ignore[union-attr]

    def add(self, span: list[LiveGroup]) -> None:
        """Let the groups of ``span`` stand side by side there."""
        self._spans.append(span)

    def move_in(self) -> None:
        """Make the memory of all that was added, and move there."""
        of_weights = [span for span in self._spans if isinstance(span[0].members[0], Weight)]
        of_sums = [span for span in self._spans if not isinstance(span[0].members[0], Weight)]
        self._spans = []
        with plain_torch():
            self._move_weights(of_weights)
            self._house_sums(of_sums)

    def _move_weights(self, spans: Sequence[Sequence[LiveGroup]]) -> None:
        sizes = [_size(span) for span in spans]
        parts = map_common(self.machine, sizes, by=0, name="weights") if spans else []
        moving: list[tuple[Weight, Tensor]] = []
        for span, pages in zip(spans, parts, strict=True):
            self.nbytes += sum(weight.nbytes for group in span for weight in group.weights)
            self._device.host_mapped(pages.common)
            common, own = pages.common.bytes()[: pages.nbytes], pages.own.bytes()[: pages.nbytes]
            at = 0
            for group in span:
                group.stand_in_common((common[at : at + group.nbytes], common), (own[at : at + group.nbytes], own))
                for weight in group.weights:
                    shape, dtype, count = weight.host.shape, weight.host.dtype, weight.host.numel()
                    weight.common = pages.common.view(dtype, count, at + weight.start).view(shape)
                    moving.append((weight, pages.own.view(dtype, count, at + weight.start).view(shape)))
                at += group.room
            if sum(weight.nbytes for weight, _ in moving) >= _MOVED_AT_ONCE:
                self._move(moving)
        self._move(moving)

    def _move(self, moving: list[tuple[Weight, Tensor]]) -> None:
        for weight, _ in moving:
            if weight.owner == self.machine.rank and weight.common is not None:
                weight.common.copy_(weight.host)
        # Without this, a process would give up its copy for memory that the owner has not filled yet.
        self.machine.barrier()
        for weight, own in moving:
            weight.rehost(own)
        moving.clear()

    def _house_sums(self, spans: Sequence[Sequence[LiveGroup]]) -> None:
        memory = self.memory_of_all([_size(span) for span in spans], "sums") if spans else []
        for rank, of_one in enumerate(memory):
            own = rank == self.machine.rank
            for span, common in zip(spans, of_one, strict=True):
                at = 0
                for group in span:
                    for total in group.sums:
                        place = carve(common, at + total.start, total.weight.host)
                        total.places = (*total.places, place)
                        if own:
                            total.host = place
                    if own:
                        group.host, group.span = common[at : at + group.nbytes], common
                    at += group.room

    # -- what users write --------------------------------------------------------------------------------------------

    def writing(self, weights: Iterable[Weight], wait: Callable[[Iterable[LiveGroup]], object]) -> None:
        """A user is about to write ``weights`` or their states here; ``wait`` brings groups home."""
        written = list(weights)
        if any(weight.common is not None for weight in written):
            wait(dict.fromkeys(weight.group for weight in self.weights))
        for weight in written:
            self._written.add(weight.index)
            if weight.common is not None:
                weight.group.read_own()

    def suspect(self, weights: Iterable[Weight]) -> None:
        """Somebody has a view of ``weights``, which are complete, through which he may have written here."""
        for weight in weights:
            if weight.common is not None and not _same(weight.host, weight.common):
                self._written.add(weight.index)
                weight.group.read_own()

    def publish(self, *, gradients: bool = False) -> list[Weight]:
        """Let what users have written, in every process alike, be in the common memory; all processes call this.

        ``gradients``: those that were written, too, are to be alike: they are about to be used. Returns those whose
        optimizer states are others than the common ones, in some process. Raises ``UnsupportedError`` if only some
        processes have written a weight, or others have written other values.
        """
        with plain_torch():
            states, edited = self.states, self.edited if gradients else ()
            told = [_WRITTEN * (w.index in self._written) | _EDITED * (w.index in edited) for w in self._all]
            if states is not None:
                told = [said | _REPLACED * states.replaced(w) for said, w in zip(told, self._all, strict=True)]
            rows = list(zip(*self._others.gather(told, UPDATE), strict=True))
            written = [w for w, row in zip(self._all, rows, strict=True) if any(said & _WRITTEN for said in row)]
            for weight, row in zip(self._all, rows, strict=True):
                for bit, what in _DONE.items():
                    wrote = [rank for rank, said in enumerate(row) if said & bit]
                    if 0 < len(wrote) < self._others.size:
                        who = ", ".join(map(str, wrote))
                        raise limits.ONE_PROCESS.error(f"{what.format(weight.label)} in process {who} only")
            compared = {w.label: [own for _, own in self._pairs(w)] for w in written}
            for weight in self._all:
                if weight.index in edited and weight.total is not None:
                    compared[f"the gradient of {weight.label}"] = [weight.total.host]
            if compared:
                check_alike([*compared], self._others.gather(contents([*compared.values()]), UPDATE))
            self._publish([weight for weight in written if weight.common is not None])
        self._written.clear()
        self.edited.clear()
        return [w for w, row in zip(self._all, rows, strict=True) if any(said & _REPLACED for said in row)]

    def _publish(self, written: Sequence[Weight]) -> None:
        if not written:
            return
        for weight in written:
            if weight.owner == self.machine.rank:
                for common, own in self._pairs(weight):
                    common.copy_(own)
        # Without this, a process would drop its own pages and see the values of before.
        self.machine.barrier()
        for weight in written:
            for _, own in self._pairs(weight):
                drop_own(own)
            weight.group.read_common()

    def _pairs(self, weight: Weight) -> list[tuple[Tensor, Tensor]]:
        """Return the host copies of ``weight`` and its states: in common memory, and as users see them."""
        if weight.common is None:
            return [(weight.host, weight.host)]
        return [(weight.common, weight.host), *(self.states.pairs(weight) if self.states is not None else ())]

    # -- updates -----------------------------------------------------------------------------------------------------

    def begin_updates(self, *, beside: bool) -> list[Weight]:
        """Begin a round of updates; ``beside``: each waits until nobody reads what it changes, else all do so here."""
        if not beside:
            fetched = distinct(weight.group.last_fetch for weight in self.trained)
            self._device.synchronize(self._device.mark(), *fetched)
        self._round += 1
        return self.publish(gradients=not beside)

    def theirs(self, weight: Weight) -> bool:
        """Return whether another process updates ``weight``."""
        return weight.owner is not None and weight.owner != self.machine.rank

    def done(self, op: int, number: int | None = None) -> Callable[[], None]:
        """Return what tells the others that this process's part of ``op`` is done, for the time ``number``.

        None: in this round of updates; they read what has been updated.
        """
        number = self._round if number is None else number
        return partial(operator.setitem, self._done, (self.machine.rank, op), number)

    def gave(self, op: int, weights: Sequence[Weight]) -> list[Callable[[], None]]:
        """Return what tells the others that the gradients for ``op``, an update, are there, some for ``weights``."""
        columns = [2 * self._ops + weight.index for weight in weights]
        # The op last: who sees it sees the others.
        rank = self.machine.rank
        return [partial(operator.setitem, self._done, (rank, at), self._round) for at in (*columns, self._ops + op)]

    def awaiting(self, op: int) -> Callable[[], None]:
        """Return what waits until the gradients for ``op`` are there in all processes of this machine."""
        return partial(self.wait_for, range(self.machine.size), self._ops + op, self._round)

    def given(self, weight: Weight) -> Callable[[], bool]:
        """Return what tells, behind :meth:`awaiting`, whether some process has a gradient for ``weight``."""
        done, column, number = self._done, 2 * self._ops + weight.index, self._round
        return lambda: bool((done[:, column] == number).any())

    def memory_of_all(self, sizes: Sequence[int], name: str) -> list[list[Tensor]]:
        """Return memory of these ``sizes`` of each process, in the order of ranks, which all see."""
        self.nbytes += self.machine.size * sum(sizes)
        memory = []
        for rank in range(self.machine.size):
            parts = map_common(self.machine, sizes, rank, name=name)
            if rank == self.machine.rank:
                for pages in parts:
                    self._device.host_mapped(pages.common)
            memory.append([pages.common.bytes()[: pages.nbytes] for pages in parts])
        return memory

    def wait_for(self, ranks: Iterable[int], op: int, number: int) -> None:
        """Wait until processes of this machine have carried out their part of ``op`` for the time ``number``.

        Raises ``ProcessError`` if another process has failed, and ``GaveUp`` if a task of this one has: the others may
        wait for what that would have done, and not come to this.
        """
        pause = _FIRST_POLL_S
        while any(self._done[rank, op] < number for rank in ranks):
            if self._device.failed:
                raise GaveUp
            self.machine.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def updated(self, op: int, weights: Sequence[Weight], own: Event, urgency: int) -> Event:
        """Let the groups of ``weights``, which others update, be complete when their owners have carried ``op`` out.

        ``own`` is the event of what this process does for ``op``, an update. Returns the event of all of it.
        """
        owners = {weight.owner for weight in weights if weight.owner is not None}
        groups = list(dict.fromkeys(weight.group for weight in weights))
        # An owner that adds up reads everybody's sums, and writes the first process's, in its update or before.
        groups += dict.fromkeys(w.total.group for w in weights if w.total is not None and w.total.elsewhere)
        return self.updated_by(owners, op, groups, own, urgency)

    def updated_by(
        self,
        ranks: Collection[int],
        op: int,
        groups: Sequence[LiveGroup],
        own: Event,
        urgency: int,
        cells: Sequence[Cell] = (),
    ) -> Event:
        """Do the same where ``groups`` and ``cells`` are complete, or free, when ``ranks`` have carried ``op`` out."""
        if not ranks:
            return own
        task = HostTask(lane="peers", op=op, label=f"others' part of op {op}", urgency=urgency)
        task.work.append(partial(self.wait_for, sorted(ranks), op, self._round))
        # All that reads them was over when these updates began, but for fetches of a settling pass, which count no more
        # when the update is over.
        task.after += [own, self._device.mark(), *(group.last_fetch for group in groups)]
        task.groups, task.writes = [*groups], [*cells]
        return task.queue(self._device)


def _weight(member: Member) -> Weight | None:
    if isinstance(member, Weight):
        return member
    return member.weight if isinstance(member, Sum) else None


def _size(span: Sequence[LiveGroup]) -> int:
    return sum(group.room for group in span)


def _same(own: Tensor, common: Tensor | None) -> bool:
    return common is not None and torch.equal(own.view(-1).view(torch.uint8), common.view(-1).view(torch.uint8))
