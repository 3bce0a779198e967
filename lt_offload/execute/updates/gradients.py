"""The way of a gradient: held until complete, then used on the device or sent to the host.

A complete gradient drives the plan: the op that takes it, an update on the device or an offload, runs at once. On the
host, gradients arrive where their group has its place, and each copy waits for the updates that read what was there.

In windows of several micro-batches the first pass stores its gradients as sums, on the host by the very copy that
brings them, and the others add theirs, one micro-batch after the other, as plain PyTorch adds to ``p.grad``: on
whatever processor, an addition is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.memory.common import Common
from lt_offload.execute.memory.host_task import HostTask
from lt_offload.execute.memory.live_group import LiveGroup, distinct, needed_by_compute
from lt_offload.execute.memory.tensors import Weight, add_in_order
from lt_offload.execute.program import Program
from lt_offload.execute.updates.arrivals import Arrivals
from lt_offload.execute.updates.clipping import Clipping, norms
from lt_offload.execute.updates.gradient_slots import GradientOffload, Slots
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.execute.updates.tables import Pairs, RowUse, Table, square_sum
from lt_offload.schema.plan import ADDING, Op, Pass
from lt_offload.schema.profile import COLLECTED_BELOW


class Gradients:
    """Collects the gradients of a running backward and starts the updates."""

    def __init__(
        self,
        device: Device,
        updates: Updates,
        weights: Sequence[Weight],
        program: Program,
        tables: Sequence[Table] = (),
        common: Common | None = None,
    ) -> None:
        """Collect them; ``tables``: those that are updated in two parts; ``common``: what processes have together."""
        self.device = device
        self.updates = updates
        self.square_sums: list[Tensor] | None = None
        """Squared norms of this iteration's gradients, if somebody asked for them."""
        self.updated = 0
        """Tensors updated so far."""
        self.common = common
        """Memory that several processes have in common: each updates what it owns of that."""
        self._weights = weights
        self._host_grads: dict[int, Tensor] = {}
        self._direct_grads: dict[int, Tensor] = {}
        """The host gradients that the backward writes itself, as the device sees them."""
        beside = None if program.delayed else common
        self._slots = Slots(device, program, weights, beside)
        self._tables = {table.weight.index: table for table in tables}
        """The tables that are updated in two parts."""
        for box in self._slots.of.values():
            if box.op.rows != "looked up":
                self._host_grads.update(box.hosts)
                continue
            for index, host in box.hosts.items():
                self._tables[index].arrived, self._tables[index].cell = host, box.cell
        for index, table in self._tables.items():
            self._slots.box_of[index].cells.append(table.aside)
        self._program = program
        self._last = program.blocks - 1
        self._which: Pass = program.passes[0]
        self._completing = False
        """Sums are complete with this pass, so that their norms may be asked for."""
        self._norms: dict[int, Tensor] = {}
        """By weight: the norm of a gradient that will be the whole sum on the host."""
        self.clipping = Clipping(device, weights)
        self.arrivals = Arrivals(beside, device, updates, self._slots, self.clipping, weights) if beside else None
        """The gradients of all processes, for updates beside the backward."""
        for tensor in program.written:
            host = device.host_empty(weights[tensor].host.shape, weights[tensor].host.dtype)
            self._host_grads[tensor], self._direct_grads[tensor] = host, device.zero_copy_view(host)
        self._arrived: dict[int, Event] = {}
        self._read: dict[int, Event] = {}
        """By weight whose gradient the backward writes to the host: when the last one has been added to the sum."""
        self._complete: defaultdict[int, list[tuple[Weight, Tensor | None]]] = defaultdict(list)
        """By op that sends them: complete gradients; None of a weight that has some of other micro-batches only."""
        self._usable: defaultdict[int, list[tuple[Weight, Tensor | None]]] = defaultdict(list)
        """The same by op that uses them on the device."""
        self._takers = program.takers[self._which]
        self._written: list[Weight] = []
        self._touched: set[int] = set()
        self._expected: set[int] = set()
        """Weights of the block whose backward runs: no other gradients can come."""
        # Through a weak reference: what autograd holds is never collected.
        hook = partial(_collect, ref(self))
        trainable = (weight for weight in weights if weight.param.requires_grad)
        self._handles = [w.param.register_post_accumulate_grad_hook(partial(hook, w.index)) for w in trainable]  # type: ignore[no-untyped-call]

    def look_up(self, lookups: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the tokens that the first block was called with, by table, before there was a plan."""
        for table in self._tables.values():
            table.look_up([ids for param, ids in lookups if param is table.weight.param])

    def remove(self) -> None:
        """Detach every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for table in self._tables.values():
            table.remove()

    def reset(self, weights: Sequence[Weight]) -> None:
        """Forget everything about an iteration that has not been finished."""
        for weight in weights:
            weight.seen, weight.grad = 0, None
        self._complete.clear()
        self._usable.clear()
        self._written.clear()
        self._arrived.clear()
        self._norms.clear()
        self._touched.clear()
        self._expected.clear()

    def start(self, which: Pass, *, last: bool = False) -> None:
        """Do with gradients what this kind of pass does, from now on.

        ``last``: sums are complete with this pass, unless there are to be more than was said. Raises
        ``UnsupportedError`` if there are to be more gradients after they have been clipped.
        """
        # A gradient that came after clipping would be scaled with the sums, whose norm has not counted it.
        if which != "settling":
            self.clipping.check_more()
            self._takers = self._program.takers[which]
        self._which, self._completing = which, last
        for table in self._tables.values():
            table.begin()

    def forget_sums(self) -> None:
        """Begin a window anew."""
        self.clipping.forget()
        for weight in self._weights:
            if weight.total is not None:
                weight.total.use_up()
                weight.total.group.empty()

    def end_iteration(self, others: Sequence[Tensor]) -> Tensor | None:
        """Forget how gradients were clipped; return their norm and ``others``' (squared) before, None if not asked."""
        self.clipping.forget()
        sums, self.square_sums = self.square_sums, None
        if sums is None:
            return None
        if self.arrivals is not None:
            self.device.drain()
            sums = self.arrivals.squares()
        if self._tables or any(weight.total is not None for weight in self._weights):
            self.device.drain()  # the host has squared its sums
            sums = [square.cpu() for square in sums]
        sums = [*sums, *(square.to(sums[0].device) if sums else square for square in others)]
        return torch.stack(sums).sum().sqrt() if sums else None

    def begin_block(self, weights: Sequence[Weight]) -> None:
        """A block's backward begins, which gives ``weights`` gradients, each once; refuses those that have one."""
        for weight in weights:
            if weight.param.grad is not None:
                raise limits.SET_GRADIENT.error(f"{weight.label} has a gradient before the backward")
        self._expected = {weight.index for weight in weights}

    def _completed(self, weight: Weight) -> None:
        grad, weight.grad, weight.seen = weight.grad, None, 0
        if weight.index in self._tables:
            self._complete[self._tables[weight.index].sends.id].append((weight, None))
            return
        op = self._takers[weight.index]
        if grad is None:
            # No gradient in this micro-batch, but sums of others that are waiting for the update.
            if op.kind == "update" and _filled(weight):
                self._usable[op.id].append((weight, None))
            return
        if self.square_sums is not None and self._which == "updating" and not _filled(weight) and not self.arrivals:
            self.square_sums.append(square_sum(grad))
        if op.id in self._program.used_on_device:
            self._usable[op.id].append((weight, grad))
            if grad.nbytes >= COLLECTED_BELOW:
                self._use_on_device()  # at once, so that the memory of a large gradient is free again
        elif op.lane == "compute":
            self._write_out(weight, grad)
        else:
            self._complete[op.id].append((weight, grad))

    def end_block(self, weights: Sequence[Weight]) -> None:
        """Count the uses that gave no gradient, and use what is left of the block on the device."""
        for weight in weights:
            if weight.param.requires_grad and weight.index not in self._touched:
                weight.seen += 1
                if weight.seen == weight.uses:
                    self._completed(weight)
        self._touched.clear()
        self._expected = set()
        if self._usable:
            self._use_on_device()

    def end_backward_of(self, block: int) -> None:
        """A block's backward has ended, in all its parts: gradients of the last one for tables are complete."""
        for index, op in self._program.of_last_block[self._which].items() if block == self._last else ():
            self._complete[op].append((self._weights[index], self._tables[index].end_last_block()))

    def _use_on_device(self) -> None:
        items = [item for taken in self._usable.values() for item in taken]
        self._usable.clear()
        weights = [weight for weight, _ in items]
        updating = self._which not in ADDING
        groups: dict[LiveGroup, None] = {}
        for weight in weights if updating else ():
            groups[weight.group] = None
            if weight.states.group is not None:
                groups[weight.states.group] = None
        for weight in weights:
            if weight.total is not None:
                groups[weight.total.group] = None
        # Everything that is written, at once: one wait of the compute lane instead of one per tensor.
        present = [group for group in groups if group.buffer is not None]
        needed_by_compute(self.device, present, by="an update", write=True)
        # A weight without a sum, mostly, whose gradient is all there is.
        grads = [grad if grad is not None and w.total is None else self._added(w, grad) for w, grad in items]
        del items  # what has been added up is free
        if updating:
            self._update_on_device(weights, grads, groups)
            return
        for group in groups:
            group.changed_on_device()
        if self._completing:
            totals = [weight.total for weight in weights if weight.total is not None]
            for total, norm in zip(totals, norms(grads), strict=True):
                total.fill(norm)

    def settle_on_device(self, weights: Sequence[Weight]) -> None:
        """Update those of ``weights`` on the device that have gradients: the sums are all there is."""
        filled: list[tuple[Weight, Tensor | None]] = [(weight, None) for weight in weights if _filled(weight)]
        if filled:
            self._usable[0] = filled
            self._use_on_device()

    def _update_on_device(self, weights: Sequence[Weight], grads: list[Tensor], groups: Iterable[LiveGroup]) -> None:
        """Update ``weights``, whose ``groups`` are there, and use the sums up."""
        edit = self.clipping.edit()
        if edit is not None:
            for grad in grads:
                edit(grad)
        self.updates.update_on_device(weights, grads)
        totals = [weight.total for weight in weights if weight.total is not None]
        sums = {total.group for total in totals}
        for group in groups:
            group.empty() if group in sums else group.changed_on_device()
        for total in totals:
            total.use_up()
        self.updated += len(weights)

    def _added(self, weight: Weight, grad: Tensor | None) -> Tensor:
        """Return the sum of a weight's gradients on the device, ``grad`` included, where there is or has to be one."""
        total = weight.total
        updating = self._which not in ADDING
        if total is None or (updating and not total.filled):
            assert grad is not None
            return grad
        assert total.view is not None
        if grad is not None:
            with torch.no_grad():
                total.view.add_(grad) if total.filled else total.view.copy_(grad)
        if self.square_sums is not None and updating:
            self.square_sums.append(square_sum(total.view))
        total.fill()
        return total.view

    def _write_out(self, weight: Weight, grad: Tensor) -> None:
        """Write a gradient to host memory from the compute lane; nobody keeps it on the device."""
        # The last update, which read the host buffer, is over: this pass's forward has waited for the weight that it
        # made. That holds as every block runs in every forward; additions to a sum, which no forward waits for, do not
        # make a weight, and are waited for here.
        self.device.wait(*distinct([self._read.pop(weight.index, None)]), writes=[weight.grad_cell])
        self.device.cross("d2h", grad.nbytes)
        with torch.no_grad():
            self._direct_grads[weight.index].copy_(grad)
        self._written.append(weight)
        if self._completing and not _filled(weight):
            (self._norms[weight.index],) = norms([grad])

    def send(self) -> list[tuple[Op, GradientOffload]]:
        """Queue the copies of complete gradients to the host, one task per op; return what they keep alive, by op."""
        if self._written:
            written = self.device.mark()
            self._arrived.update((weight.index, written) for weight in self._written)
            self._written.clear()
        sent = []
        for op in list(self._complete):
            taken = self._complete.pop(op)
            members = [(weight, grad) for weight, grad in taken if grad is not None]
            beginning = self._slots.beginning.get(op)
            if beginning is not None:
                sent.append((beginning, self._begin_sums(beginning, members)))
                continue
            box = self._slots.of[op]
            more: Pairs = []
            if box.op.rows is not None:
                table = self._tables[taken[0][0].index]
                more = table.tokens() if members else table.rows()
                if not members and not more:
                    continue  # the first block has no gradient in this batch
            offload = self._slots.send(box, members, more)
            sent.append((box.op, offload))
            self._arrived.update([(weight.index, offload.event) for weight, _ in members or taken])
        return sent

    def _begin_sums(self, op: Op, members: Sequence[tuple[Weight, Tensor]]) -> GradientOffload:
        """Queue the copies of the first gradients of a window to where their sums are."""
        if op.rows is None and self._completing:
            return self._slots.begin_sums(op, members, norms([grad for _, grad in members]))
        if op.rows is None:
            return self._slots.begin_sums(op, members, [None] * len(members))
        table = self._tables[members[0][0].index]
        table.begun, table.filled = True, False
        return self._slots.begin_sums(op, members, [None] * len(members), table.tokens(), [table.aside])

    def use_on_host(self, op: Op, weights: Sequence[Weight], urgency: int) -> Event | None:
        """Queue what the host does with the gradients of ``weights`` that have been sent; return its event."""
        if op.rows is not None:
            return self._use_rows(op, weights[0], urgency)
        updating = op.updates
        if updating and self.arrivals is not None:
            self.updated += len(weights)
            return self.arrivals.update(op, weights, self._arrived, urgency, squares=self.square_sums is not None)
        ready = [w for w in weights if w.index in self._arrived or (updating and _filled(w))]
        if not ready:
            self._slots.skipped(op.id, weights)
            return None
        arrived = [w for w in ready if w.index in self._arrived]
        task = HostTask(op=op.id, label=f"{op.kind} {op.block}", urgency=urgency)
        # Gradients arrive after the last computation that may have read the weights in host memory.
        task.after += [self._arrived.pop(w.index) for w in arrived]
        task.reads += [w.grad_cell for w in arrived]
        task.groups += [total.group for w in ready if (total := w.total) is not None]
        for weight in arrived:  # sums are begun, but by updates, which have all there is if there is no sum
            sums, grad = weight.total, self._host_grads[weight.index]
            if sums is not None and (sums.filled or not updating):
                task.work.append(partial(sums.host.add_ if sums.filled else sums.host.copy_, grad))
        theirs = self._update_on_host(task, ready) if updating else []
        if len(arrived) < len(ready):  # no gradient that arrives comes after what has read the weights
            task.after += [self.device.mark(), *(group.last_fetch for group in task.groups)]
        task.queued.append(partial(self._slots.updated, op.id))
        event = task.queue(self.device)
        if updating and self.common is not None:
            event = self.common.updated(op.id, theirs, event, urgency)
        for weight in ready:
            if weight.total is not None:
                weight.total.use_up() if updating else weight.total.fill(self._norms.pop(weight.index, None))
            if weight.index in self._direct_grads:
                self._read[weight.index] = event
        return event

    def _update_on_host(self, task: HostTask, weights: Sequence[Weight]) -> list[Weight]:
        """Let ``task`` update ``weights``, whose gradients it has added up; return those that other processes update.

        What it does in their order: it adds up sums of processes, notes squares, clips, and updates.
        """
        theirs = [w for w in weights if self.common is not None and self.common.theirs(w)]
        mine = [w for w in weights if w not in theirs]
        grads = [self._host_grads[w.index] if w.total is None else self._used(w) for w in mine]
        self.updates.leave_to_others(theirs)
        self.updated += len(weights)
        task.groups += [w.group for w in mine]
        task.work += [partial(add_in_order, w.total.places) for w in mine if w.total is not None and w.total.parted]
        squares = self.square_sums
        if squares is not None:
            sums = [w.total.host for w in weights if _filled(w) and w.total is not None]
            task.work.append(lambda: squares.extend(map(square_sum, sums)))
        self.clipping.edit_in(task, grads)
        if mine:  # now, with the options of this moment: a scheduler may change them before the task runs
            task.work.append(self.updates.prepare(mine, grads))
        if self.common is not None:
            task.work.append(self.common.done(task.op))
        return theirs

    def _used(self, weight: Weight) -> Tensor:
        """Return what an update of ``weight`` reads in host memory."""
        total = weight.total
        if total is None or not total.filled:
            return self._host_grads[weight.index]
        return total.places[0] if total.elsewhere else total.host

    def _use_rows(self, op: Op, weight: Weight, urgency: int) -> Event:
        """Queue what the host does with the gradient of a part of a table; return its event."""
        table, first, updating = self._tables[weight.index], op.rows == "others", op.updates
        total = weight.total
        if first:
            table.begun, table.filled = False, _filled(weight)
        sums = total if total is not None and (table.filled or not updating) else None
        arrived = self._arrived.pop(weight.index, None)
        task = HostTask(op=op.id, label=op.label, urgency=urgency, writes=[table.aside])
        task.groups += [weight.group] * updating + ([sums.group] if sums is not None else [])
        task.reads.append(weight.grad_cell if first else table.cell)
        task.after += [self.device.mark() if arrived is None else arrived, *(g.last_fetch for g in task.groups)]
        task.queued.append(partial(self._slots.updated, op.id))
        grad = self._host_grads[weight.index]
        if first and arrived is None:  # no backward has come: the sum is all there is
            assert sums is not None
            grad, sums = sums.host, None
        use = RowUse(
            sums=sums.host if sums is not None else None,
            update=self.updates.prepare_rows(weight, begins=first) if updating else None,
            edit=self.clipping.edit(),
            squares=self.square_sums,
        )
        task.work.append(table.other_rows(grad, use) if first else table.looked_up(use))
        if total is not None and not (updating and first):
            total.use_up() if updating else total.fill()
        self.updated += updating and not first
        return task.queue(self.device)


def _filled(weight: Weight) -> bool:
    return weight.total is not None and weight.total.filled


def _collect(gradients: ref[Gradients], index: int, param: Tensor) -> None:
    """Take what a block's backward has found for a weight; refuses gradients from anywhere else."""
    collector = gradients()
    if collector is None:
        return
    weight, touched = collector._weights[index], collector._touched
    # Without this, autograd would add the next gradient to it, and keep it on the device until then.
    grad, param.grad = param.grad, None
    assert grad is not None
    if index not in collector._expected or index in touched:
        raise limits.OUTSIDE_USE.error(f"the loss uses {weight.label} outside its block")
    touched.add(index)
    # A tied weight has a graph per block, and each fires the hook: an update at the first would use half of its
    # gradient.
    table = collector._tables.get(index)
    if table is not None and table.halfway:
        table.take(grad)
    else:
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    del grad
    weight.seen += 1
    if weight.seen == weight.uses:
        collector._completed(weight)
