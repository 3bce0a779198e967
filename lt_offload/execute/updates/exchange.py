"""Sums of several machines, added up beside the backward: each block's as soon as they are complete.

A ``reduce`` of the plan begins in the last pass of a window, behind the backward whose gradients complete its sums. On
lane ``network``, one thread, which takes ops in the order of the plan in every process of every machine, it

1. waits until all processes of this machine have their part in common memory (counters there, one writer each),
2. sends and adds up what this process owns (``distributed/chain.py``); the sum of all is in the place of the machine's
   first process then, where the owner's update finds it.

A process without a gradient has zeros: whether others have one is known when the backward is over, see ``others.py``.
Nobody but lane ``network`` uses the connections of these ops. A device that runs tasks in the calling thread would hold
other processes up in the middle of its backward: there, all ops run at the end, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.execute.memory.common import Common, Others
from lt_offload.execute.memory.live_group import distinct
from lt_offload.execute.memory.tensors import Sum, Weight
from lt_offload.schema.plan import Op


class Exchange:
    """The ``reduce`` ops of an engine's plan.

    Args:
        others: all processes.
        common: where they have sums.
        device: has the lane.
    """

    def __init__(self, others: Others, common: Common, device: Device) -> None:
        self._others, self._common, self._device = others, common, device
        self._several = common.machine.size < others.size
        self._number = 0
        """Number of the present window, or of the last one; alike in all processes."""
        self._totals: set[Sum] = set()
        """The sums that are added up in this window."""
        self._events: list[Event] = []

    def begin(self, op: Op, weights: Sequence[Weight]) -> None:
        """Add up the sums of ``weights``, which are complete in this process or about to be."""
        totals = [total for weight in weights if (total := weight.total) is not None and total.places]
        if not self._several or not totals:
            return
        if not self._totals:
            self._number += 1
            self._events = []
        self._totals.update(totals)
        groups = list(dict.fromkeys(total.group for total in totals))
        event = self._device.submit(
            "network",
            self._work(op, totals),
            after=distinct(group.host_ready for group in groups),
            writes=[group.host_cell for group in groups],
            label=op.label,
            op=op.id,
            nbytes=op.bytes,
        )
        for group in groups:
            group.updated_on_host_by(event)
        self._events.append(event)

    def _work(self, op: Op, totals: Sequence[Sum]) -> Callable[[], None]:
        rank, number = self._common.machine.rank, self._number
        empty = [total.host for total in totals if not total.filled]
        own = [total.places for total in totals if total.weight.owner == rank]
        contribute = partial(self._common.contribute, op.id, number)
        complete = partial(self._common.wait_for, range(self._common.machine.size), op.id, number)

        def run() -> None:
            for place in empty:
                place.zero_()
            # After the zeros: the owner reads this place as soon as all have contributed.
            contribute()
            if own:
                complete()
                self._others.exchange(own, op.id)

        return run

    def take(self) -> set[Sum]:
        """Return what is added up, or will be when what has been queued is over; the window is over."""
        totals, self._totals = self._totals, set()
        return totals

    def finish(self, totals: Collection[Sum]) -> None:
        """Wait until ``totals`` are added up in all processes of this machine, and let all have them."""
        machine = self._common.machine
        self._device.synchronize(*self._events)
        for group in dict.fromkeys(total.group for total in totals):
            group.awaited_on_host()
        machine.barrier()
        with plain_torch():
            for total in totals:
                for place in total.places[1:] if total.weight.owner == machine.rank else ():
                    place.copy_(total.places[0])
        # Without this, a process would read its place before the owner has written the sum there.
        machine.barrier()

    def forget(self) -> None:
        """The backward has failed: what it has begun is over, or fails, too."""
        self._totals, self._events = set(), []
