"""Updates of several processes of one machine beside the backward: each as soon as its gradients are there in all.

Plans without waiting, whose updates are all on the host, are carried out so. Gradients arrive where all processes see
them: in the slots of ``gradient_slots.py``, or, in windows of several micro-batches, in every process's own sums. Of an
update each process queues, in the order of the plan,

1. *giving*: behind the copies that bring its gradients, and whatever else reads the weights on the host, it adds the
   last gradients to its own sums, writes zeros where it has none, and says so in common memory;
2. *awaiting* (lane ``parts``): until all processes have said so;
3. the update, in which it adds up what it owns, in the order of ranks, and updates it;
4. the event of all of it (lane ``peers``, ``memory/common.py``): all owners have updated. Fetches of the weights come
   after it, and so do copies of other gradients to the same places, which owners read.

The host's lane never waits for others, so that no two processes wait for each other: what a process waits for in 2
depends on copies that are earlier in the plan, and on updates that are. Lane ``parts`` keeps the order of the plan,
which is the same everywhere. Where tasks run in the calling thread, 1 happens at once, or another process might wait
for it while this one waits for that.

A weight that no process has a gradient for is not updated. Its owner learns that when 2 is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.memory.host_task import HostTask
from lt_offload.execute.memory.tensors import Weight, add_in_order
from lt_offload.execute.updates.tables import square_sum
from lt_offload.schema.plan import Op

if TYPE_CHECKING:
    from lt_offload.execute.memory.common import Common
    from lt_offload.execute.updates.clipping import Clipping
    from lt_offload.execute.updates.gradient_slots import Slots
    from lt_offload.execute.updates.optimizer import Updates


@dataclass(frozen=True, slots=True)
class _Owned:
    """One weight of an update that this process carries out."""

    index: int
    places: Sequence[Tensor]
    """The gradients of all processes."""
    grad: Tensor
    """Their sum, which the update uses."""
    given: Callable[[], bool]
    """The answer, True if some process has one."""

    def add_up(self) -> None:
        first, *others = self.places
        if self.grad is not first:
            self.grad.copy_(first)
        add_in_order([self.grad, *others])


class Arrivals:
    """The gradients of all processes of a machine, as they arrive."""

    def __init__(
        self,
        common: Common,
        device: Device,
        updates: Updates,
        slots: Slots,
        clipping: Clipping,
        weights: Sequence[Weight],
    ) -> None:
        self._common, self._device, self._updates = common, device, updates
        self._slots, self._clipping = slots, clipping
        # A weight that nobody owns is updated in every process, which leaves what the others read as it is.
        self._sums = {w.index: torch.empty_like(w.host) for w in weights if w.param.requires_grad and w.owner is None}
        self._squares: dict[int, Tensor] = {}
        """By weight that this process has updated: the squared norm of its gradient, where that is asked for."""

    def update(
        self, op: Op, weights: Sequence[Weight], arrived: dict[int, Event], urgency: int, *, squares: bool
    ) -> Event:
        """Queue what this process does of ``op``, an update on the host; return the event of all that all do.

        ``arrived``: by weight, when its gradient of this pass is there; used up. ``squares``: norms are asked for.
        """
        common = self._common
        with_gradient = [w for w in weights if w.index in arrived or (w.total is not None and w.total.filled)]
        self._give(op, weights, with_gradient, arrived, urgency)
        awaited = self._device.submit("parts", common.awaiting(op.id), label=f"gradients for op {op.id}")
        of_others = [weight for weight in weights if common.theirs(weight)]
        mine = [weight for weight in weights if weight not in of_others]
        groups = list(dict.fromkeys(weight.group for weight in mine))
        sums = list(dict.fromkeys(w.total.group for w in weights if w.total is not None))
        cells = list(dict.fromkeys(weight.grad_cell for weight in weights))
        task = HostTask(op=op.id, label=f"update {op.block}", urgency=urgency, after=[awaited])
        task.work += [self._work(mine, with_gradient, squares=squares), common.done(op.id)]
        task.groups, task.writes = [*groups, *sums], cells
        own = task.queue(self._device)
        self._updates.leave_to_others(of_others)
        # Whoever updates reads what all processes have.
        alone = any(weight.owner is None for weight in weights)
        owners = {weight.owner for weight in of_others if weight.owner is not None}
        ranks: Collection[int] = range(common.machine.size) if alone else owners
        event = common.updated_by(ranks, op.id, [*(w.group for w in of_others), *sums], own, urgency, cells)
        self._slots.updated(op.id, event)
        for weight in weights:
            if weight.total is not None:
                weight.total.use_up()
        return event

    def _give(
        self,
        op: Op,
        weights: Sequence[Weight],
        with_gradient: Sequence[Weight],
        arrived: dict[int, Event],
        urgency: int,
    ) -> None:
        """Queue what completes the gradients for ``op`` here, those of ``with_gradient``, and tells the others."""
        here = [weight for weight in weights if weight.index in arrived]
        none = [weight for weight in weights if weight not in with_gradient]
        totals = [weight.total for weight in weights if weight.total is not None]
        adding = [(w.total, self._slots.hosts[w.index]) for w in here if w.total is not None]
        empty = [w.total.host if w.total is not None else self._slots.hosts[w.index] for w in none]
        task = HostTask(lane="host" if adding else "parts", op=op.id, label=f"give gradients {op.block}")
        task.urgency = urgency
        task.work += [partial(total.host.add_ if total.filled else total.host.copy_, grad) for total, grad in adding]
        task.work += [place.zero_ for place in empty]
        task.work += self._common.gave(op.id, with_gradient)
        task.after += [*(arrived.pop(w.index) for w in here), *(weight.group.last_fetch for weight in weights)]
        if len(here) < len(weights):
            # What has not arrived comes after nothing that has read the weights, and nothing that has read its place.
            task.after += [self._device.mark(), *self._slots.freed(w for w in weights if w not in here)]
        task.groups, task.writes = [total.group for total in totals], [weight.grad_cell for weight in weights]
        task.queue(self._device)

    def _part(self, weight: Weight) -> _Owned:
        places = self._slots.places[weight.index] if weight.total is None else weight.total.places
        own = self._sums.get(weight.index)
        return _Owned(weight.index, places, places[0] if own is None else own, self._common.given(weight))

    def _work(self, mine: Sequence[Weight], with_gradient: Sequence[Weight], *, squares: bool) -> Callable[[], None]:
        """Return what adds up and updates, with the optimizer's options of this moment."""
        edit = self._clipping.edit()
        sure = [weight for weight in mine if weight in with_gradient]
        # Of others it is known later whether they have a gradient.
        parts = [[weight] for weight in mine if weight not in with_gradient]
        work = []
        for part in ([sure] if sure else []) + parts:
            owned = [self._part(weight) for weight in part]
            work.append((owned, self._updates.prepare(part, [one.grad for one in owned])))

        def run() -> None:
            for owned, update in work:
                # Zeros would not do: an update with them would still decay the weight and count a step.
                if not any(part.given() for part in owned):
                    continue
                for part in owned:
                    part.add_up()
                    if squares:
                        self._squares[part.index] = square_sum(part.grad)
                    if edit is not None:
                        edit(part.grad)
                update()

        return run

    def squares(self) -> list[Tensor]:
        """Return the squared norms of all gradients that all processes have updated with; all processes ask."""
        own, self._squares = self._squares, {}
        by_weight: dict[int, float] = {}
        # Of a weight that nobody owns every process has the same.
        for of_one in self._common.machine.gather({index: float(square) for index, square in own.items()}):
            by_weight |= of_one
        return [torch.tensor(by_weight[index]) for index in sorted(by_weight)]
