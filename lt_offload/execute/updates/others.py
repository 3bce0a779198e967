"""Gradients of several processes: when those of a window are complete here, they are added to everybody else's.

Every process has the same plan, so that the sums are the same tensors in all. Where they are, and whether there is a
gradient at all (an expert may have got no tokens), is asked each time: a process without one has zeros.

Sums for weights in common memory are where all processes see them, and nothing is sent: the owner adds them up, in the
order of ranks, as a part of its update. Where somebody looks at gradients before that, or at their norm, it adds them
up at once and writes them to all places. Others go through a collective.

With several machines a ``reduce`` of the plan adds up those of a block in the last pass of a window, behind the
backward that completes them. On lane ``network``, one thread, which takes ops in the order of the plan in every process
of every machine, it waits until all processes of this machine have their part in common memory (counters there, one
writer each) and adds up, over the network, what this process owns. The owner's update finds the sum in the place of the
machine's first process. A device that runs tasks in the calling thread would hold other processes up in the middle of
its backward: there, all ops run at the end, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.execute.device.record import Recorder
from lt_offload.execute.memory.common import UPDATE, Common, check_alike, contents
from lt_offload.execute.memory.host_task import HostTask
from lt_offload.execute.memory.live_group import needed_by_caller
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Sum, Weight, add_in_order
from lt_offload.schema.plan import Op

if TYPE_CHECKING:
    from lt_offload.distributed.ranks import Ranks

_FILLED, _ON_DEVICE = 1, 2
"""Statements of a process about a sum: there is a gradient in it; it is on the device."""


class SumsOfAll:
    """Adds up the gradients of all processes; those of ``rest``, outside the blocks, are ordinary ones."""

    def __init__(
        self,
        others: Ranks,
        common: Common,
        device: Device,
        weights: Sequence[Weight],
        rest: Sequence[tuple[str, nn.Parameter]],
        residency: Residency,
        recorder: Recorder,
    ) -> None:
        self._others, self._device, self._residency, self._recorder = others, device, residency, recorder
        self._common, self._machine = common, others.machine
        self._several = others.machine.size < others.size
        self._window = 0
        """Number of the present window of ``reduce`` ops, or of the last one; alike in all processes."""
        self._begun: dict[Sum, Event] = {}
        """The sums of this window that are added up between machines beside the backward."""
        self._totals = [weight.total for weight in weights if weight.total is not None]
        self._names, self._rest = [], list[nn.Parameter]()
        for name, param in rest:
            if param.requires_grad:
                self._names.append(name)
                self._rest.append(param)

    def begin(self, op: Op, weights: Sequence[Weight]) -> None:
        """Add up between machines the sums of ``weights``, which are complete in this process or about to be."""
        totals = [total for weight in weights if (total := weight.total) is not None and total.places]
        if not self._several or not totals:
            return
        self._window += not self._begun
        task = HostTask(lane="network", op=op.id, label=op.label, nbytes=op.bytes)
        task.work.append(self._work(op, totals))
        task.groups += [total.group for total in totals]
        event = task.queue(self._device)
        self._begun |= dict.fromkeys(totals, event)

    def _work(self, op: Op, totals: Sequence[Sum]) -> Callable[[], None]:
        empty = [total.host for total in totals if not total.filled]
        own = self._owned(totals)
        contribute = self._common.done(op.id, self._window)
        complete = partial(self._common.wait_for, range(self._machine.size), op.id, self._window)

        def run() -> None:
            for place in empty:
                place.zero_()
            # After the zeros: the owner reads this place as soon as all have contributed.
            contribute()
            if own:
                complete()
                self._others.add_up_rows(own, op=op.id)

        return run

    def forget(self) -> None:
        """The backward has failed: what it has begun is over, or fails, too."""
        self._begun = {}

    def add_up(self, *, by_updates: bool) -> None:
        """Let the sums of this window be those of all processes; called once per window, when they are complete.

        ``by_updates``: nobody reads them before updates use them, so that those of owners may add up what they see.
        """
        self._common.edited.clear()  # a process's own are its own until here
        begun, self._begun = self._begun, {}
        states = self._states_of_all([_state(total) for total in self._totals])
        of_sums = list(zip(self._totals, states, strict=False))
        filled = [total for total, of_all in of_sums if any(state & _FILLED for state in of_all)]
        # A collective takes tensors of one kind: what is on the device here is brought home if it is not everywhere.
        mixed = [total.group for total, of_all in of_sums if len({state & _ON_DEVICE for state in of_all}) > 1]
        if mixed:
            here = [group for group in dict.fromkeys(mixed) if group.buffer is not None]
            self._residency.bring_home(here)
            self._residency.forget(here)
        rest = self._gradients_of_rest(states[len(self._totals) :])
        now = [total for total in filled if total not in begun]
        groups = list(dict.fromkeys(total.group for total in now))
        needed_by_caller(self._device, groups)
        with torch.no_grad():
            tensors = [(total, _complete(total)) for total in now]
            self._collect([*(tensor for total, tensor in tensors if not _in_common(total)), *rest])
            self._add_up_in_common([total for total in now if _in_common(total)], by_updates=by_updates)
        # No update waits for a sum that nobody has given a gradient.
        if begun and not (by_updates and begun.keys() <= set(filled)):
            self._device.synchronize(*begun.values())
            for group in dict.fromkeys(total.group for total in begun):
                group.awaited_on_host()
            with self._recorder.waiting():
                self._machine.barrier()
            self._spread(begun)
        else:
            for total in begun:
                total.first = True
        for group in groups:
            if group.buffer is not None:
                group.changed_on_device()
        for total in filled:
            total.fill()

    @property
    def has_rest(self) -> bool:
        """True if parameters outside the blocks are trained."""
        return bool(self._rest)

    def add_up_rest(self) -> None:
        """Let gradients outside the blocks be those of all processes; updates of the blocks see to theirs."""
        self._collect(self._gradients_of_rest(self._states_of_all([])))

    def _states_of_all(self, of_sums: list[int]) -> list[tuple[int, ...]]:
        """Return what all processes say of each sum and parameter outside the blocks; refuses other values."""
        own = [*of_sums, *(_FILLED * (param.grad is not None) for param in self._rest)]
        with plain_torch():
            told = contents([[param] for param in self._rest])
        with self._recorder.waiting():
            rows = self._others.gather([*own, *told], UPDATE)
        check_alike(self._names, [row[len(own) :] for row in rows])
        return list(zip(*(row[: len(own)] for row in rows), strict=True))

    def _gradients_of_rest(self, states: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the gradients outside the blocks that some process has, zeros where it is another one."""
        gradients = []
        for param, of_all in zip(self._rest, states, strict=True):
            if any(of_all):
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                gradients.append(param.grad)
        return gradients

    def _collect(self, tensors: Sequence[Tensor]) -> None:
        """Let ``tensors`` be their sums over all processes; what carries them is no part of a device's budget here."""
        with plain_torch():
            self._others.add_up(tensors)

    def _add_up_in_common(self, totals: Sequence[Sum], *, by_updates: bool) -> None:
        """Add up sums that all processes see: each adds those that it owns, now or in its updates."""
        if not totals:
            return
        with self._recorder.waiting():
            self._machine.barrier()  # all are complete
        if self._several:
            self._others.add_up_rows(self._owned(totals))
        elif by_updates:
            for total in totals:
                total.parted = True
            return
        else:
            for places in self._owned(totals):
                add_in_order(places)
        self._spread(totals)

    def _owned(self, totals: Collection[Sum]) -> list[tuple[Tensor, ...]]:
        """Return the places of those of ``totals`` that this process adds up."""
        return [total.places for total in totals if total.weight.owner == self._machine.rank]

    def _spread(self, totals: Collection[Sum]) -> None:
        """Let all processes of this machine have the sums of all that are in the first one's places."""
        with plain_torch():
            for first, *others in self._owned(totals):
                for place in others:
                    place.copy_(first)
        # Without this, a process would read its place before the owner has written the sum there.
        self._machine.barrier()


def _state(total: Sum) -> int:
    return _FILLED * total.filled | _ON_DEVICE * (total.group.buffer is not None)


def _in_common(total: Sum) -> bool:
    return bool(total.places) and total.view is None


def _complete(total: Sum) -> Tensor:
    """Return the sum where it is, zeros if this process has no gradient for it."""
    tensor = total.host if total.view is None else total.view
    return tensor if total.filled else tensor.zero_()
