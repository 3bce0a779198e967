"""Tied embeddings by rows: a table in which the first block looks rows up, and which is the last block's matrix.

Its gradient is complete at the end of the backward, so its update, and copies that wait for it, would end an iteration
with nothing to hide behind, and until then its gradient would be held. But only rows of this batch's tokens have a
gradient of the first block. All others are those of a matrix of the last block alone: :func:`as_head` makes a profile
of that, for which any planner plans, and :func:`split` adds to such a plan what the rows of the batch need at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, takewhile

from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.iteration.memory import aligned
from lt_offload.plan.planners.baselines import no_offload_s
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import ADDING, ALIGNMENT, Op, Plan, TensorGroup
from lt_offload.schema.profile import BlockProfile, Profile, ReadProfile


def table_of(profile: Profile) -> int | None:
    """Return the table that may be updated by rows; None if there is none, or several processes share it.

    Args:
        profile: without sums of gradients, also for plans that add them up.
    """
    tables = [
        index
        for index, tensor in enumerate(profile.tensors)
        if tensor.lookup_bytes and tensor.zero_copy and not tensor.sum_bytes
    ]
    return tables[0] if len(tables) == 1 and profile.processes == 1 else None


def as_head(profile: Profile, table: int) -> Profile:
    """Return ``profile`` with ``table`` as a matrix of the last block alone, which only the host can update.

    The first block reads its rows directly, and makes a gradient of the table's size from which it takes rows.
    """
    tensor = profile.tensors[table]
    assert tensor.zero_copy is not None
    head = replace(
        tensor,
        blocks=tensor.blocks[-1:],
        zero_copy=None,
        lookup_bytes=0,
        scratch_bytes=profile.hardware.device_bytes,  # no update on the device fits
    )
    first = _reading(profile.blocks[0], tensor.read(0), tensor.bytes + tensor.lookup_bytes)
    tensors = (*profile.tensors[:table], head, *profile.tensors[table + 1 :])
    machine = profile.hardware
    room = room_of_rows(profile, table, sums=tensor.sum_bytes > 0)
    machine = replace(machine, host_bytes=max(1, machine.host_bytes - room))
    return replace(profile, tensors=tensors, blocks=(first, *profile.blocks[1:]), hardware=machine)


def room_of_rows(profile: Profile, table: int, *, sums: bool = False) -> int:
    """Return the RAM that :func:`split` adds to a plan; ``sums``: to one that adds gradients up."""
    tensor = profile.tensors[table]
    tokens = tensor.lookup_bytes * tensor.shape[0] // tensor.bytes
    # One place for what arrives, one for what the last block's gradient has at these rows, one for what their sums
    # have, and their numbers.
    return (2 + sums) * aligned(tensor.lookup_bytes) + aligned(8 * tokens) + ALIGNMENT


def _reading(block: BlockProfile, read: ReadProfile, more: int) -> BlockProfile:
    """Return ``block``, which reads rows directly and whose backward takes so many bytes ``more``."""
    options = (
        replace(
            option,
            forward_s=option.forward_s + read.forward_s,
            backward_s=option.backward_s + read.backward_s,
            backward_peak_bytes=option.backward_peak_bytes + more,
            held_peak_bytes=None,
            passing_peak_bytes=None,
        )
        for option in block.options
    )
    return replace(block, options=tuple(options))


def split(plan: Plan, profile: Profile, table: int, *, host_budget: int | None = None) -> Plan | None:
    """Return ``plan``, made for :func:`as_head`, as one for ``profile``, checked; see :func:`two_parts`.

    A plan for one micro-batch per update is priced, too.
    """
    parted = two_parts(plan, profile, table, host_budget=host_budget)
    if parted is None:
        return None
    trace = simulate(parted, profile)
    predicted = replace(
        plan.predicted,
        iteration_s=trace.iteration_time,
        lower_bound_s=min(plan.predicted.lower_bound_s, trace.iteration_time),
        no_offload_s=no_offload_s(profile),
        device_peak_bytes=trace.device_peak,
        host_peak_bytes=trace.host_peak,
    )
    return replace(parted, predicted=predicted)


def two_parts(plan: Plan, profile: Profile, table: int, *, host_budget: int | None = None) -> Plan | None:
    """Return ``plan``, made for :func:`as_head`, as one for ``profile``, checked, with the prediction of ``plan``.

    Args:
        plan: made with less RAM, see :func:`room_of_rows`; for one micro-batch per update or more.
        profile: what it is for.
        table: see :func:`table_of`.
        host_budget: RAM that it may take; None: as much more than ``plan`` may as the rows take.

    Returns:
        None if it does not update the table on the host, by ops of its own. If ``plan`` fetches it again in the
        iteration that updates it, before its last rows are there, the next iteration does that, in the step that the
        simulator likes best of a few.
    """
    choices = [plan]
    if _fetches(plan, table):
        choices = [_fetched_later(plan, table, step) for step in _starts(len(profile.blocks))]
    plans = [parted for choice in choices if (parted := _parted(choice, profile, table, host_budget)) is not None]
    if len(plans) < 2:
        return plans[0] if plans else None
    return min(plans, key=lambda parted: simulate(parted, profile).iteration_time)


def _starts(blocks: int) -> Iterator[int]:
    """Yield steps in which the next iteration may fetch the table, before the last block needs it."""
    yield 0
    yield from takewhile(lambda step: step < blocks, (1 << power for power in count()))


def _fetches(plan: Plan, table: int) -> list[int]:
    """Return the ops that fetch the table after its update, within the iteration; none if updates wait anyway."""
    updates = {op.id for op in plan.ops if op.updates_on_host and table in plan.tensors(op)}
    fetches = (op for op in plan.ops if op.kind == "prefetch" and op.payload == "weight")
    mine = (op for op in fetches if set(plan.tensors(op)) == {table} and not plan.delayed)
    return [op.id for op in mine if any(update < op.id for update in updates.intersection(op.after))]


def _fetched_later(plan: Plan, table: int, step: int) -> Plan:
    """Return ``plan`` with its :func:`_fetches` in ``step`` of the next iteration.

    What they wait for was an iteration ago, then. The table keeps its place in the arena, which nothing else needs
    from where the plan fetches it to where it is used.
    """
    fetches = _fetches(plan, table)
    at = next(op.id for op in plan.ops if op.step == step and op.computes)
    order = [op.id for op in plan.ops if op.id not in fetches]
    order[order.index(at) : order.index(at)] = fetches
    number = {op: place for place, op in enumerate(order)}
    moved = {group for op in fetches for group in plan.ops[op].groups}
    ops = []
    for old in order:
        op = replace(plan.ops[old], id=number[old], after=tuple(sorted(number[other] for other in plan.ops[old].after)))
        ops.append(replace(op, step=step) if old in fetches else op)
    return replace(
        plan,
        ops=tuple(ops),
        initial=tuple(copy for copy in plan.initial if copy.group not in moved),
    )


def _parted(plan: Plan, profile: Profile, table: int, host_budget: int | None) -> Plan | None:
    """Return ``plan``, which does not fetch the table too early, in two parts, checked."""
    parts = _TwoParts(plan, profile, table)
    if not parts.possible:
        return None
    changed = replace(
        plan,
        fingerprint=profile.fingerprint,
        host_budget_bytes=host_budget or plan.host_budget_bytes + parts.room,
        groups=parts.groups(),
        ops=parts.ops(),
        gradient_bytes=plan.gradient_bytes + parts.room,
        notes=(*plan.notes, f"{profile.tensors[table].name} is updated in two parts: {_PARTS}"),
    )
    changed = timed(changed, profile)
    return None if check(changed, profile) else changed


_PARTS = "rows that the batch does not look up as soon as the last block's gradient is there, the others at the end"


class _TwoParts:
    """The ops of a plan for :func:`as_head`, and those that send the rows' gradient, add it up, and update them."""

    def __init__(self, plan: Plan, profile: Profile, table: int) -> None:
        self.plan, self.profile, self.table = plan, profile, table
        mine = [op for op in plan.ops if table in plan.tensors(op)]
        self.sends = [op for op in mine if op.sends_gradients]
        """One op; two in plans that add gradients up, of which the first begins a sum."""
        self.adds = [op for op in mine if op.kind == "accumulate"]
        self.updates = [op for op in mine if op.updates_on_host]
        self.reads = {op.id for op in plan.ops if op.computes and op.block == 0}
        self.backward = next((op.id for op in plan.ops if op.kind == "backward" and op.block == 0), -1)
        step = plan.ops[self.backward].step
        last = [op.id for op in plan.ops if op.step == step and (op.computes or op.payload == "grad" or not op.payload)]
        self.at = max(last) + 1
        """Position of the new ops."""
        self.uses = range(self.at + 1, self.at + 2 + len(self.adds) - plan.delayed)
        """The new accumulate and update ops, behind the copy. Where updates wait, one update serves all rows."""
        self.room = room_of_rows(profile, table, sums=plan.adds_up)

    @property
    def possible(self) -> bool:
        """True: the plan can be taken in two parts."""
        plan, sums = self.plan, self.plan.adds_up
        if (len(self.sends), len(self.adds), len(self.updates)) != (1 + sums, sums, 1):
            return False
        if any(op.block == 0 and op.save is not None for op in plan.ops):
            return False  # a forward that ran again in the backward would look rows up that have been updated
        named = [group for op in (*self.sends, *self.adds, *self.updates) for group in op.groups]
        alone = all(plan.groups[group].tensors == (self.table,) for group in named)
        update = self.updates[0].id
        # What waits for the update within the iteration would come before the last rows are updated.
        early = (op for op in plan.ops if update < op.id and update in op.after and not op.sends_gradients)
        return alone and (plan.delayed or not any(early))

    def groups(self) -> tuple[TensorGroup, ...]:
        """Return the groups, that of the rows last."""
        size = aligned(self.profile.tensors[self.table].lookup_bytes)
        at = self.plan.gradient_bytes
        return (*self.plan.groups, TensorGroup(payload="grad", tensors=(self.table,), sizes=(size,), host_offset=at))

    def ops(self) -> tuple[Op, ...]:
        """Return the ops."""
        changed = [self._changed(op) for op in self.plan.ops]
        return (*changed[: self.at], *self._new(), *changed[self.at :])

    def _number(self, op: int) -> int:
        return op + (1 + len(self.uses)) * (op >= self.at)

    def _changed(self, op: Op) -> Op:
        (weight,) = self.updates[0].groups
        first, delayed = self._number(self.updates[0].id), self.plan.delayed
        last = first if delayed else self.uses[-1]
        after = {self._number(other) for other in op.after}
        if op.id in self.reads:
            # A backward of the first block reads nothing of the table, but the framework holds it meanwhile.
            after |= {first} if op.id == self.backward else {first, last}
            if self.adds and op.id != self.backward:
                after.add(self.at)  # a pass that only adds up makes no update that has waited for it
            read = self.profile.tensors[self.table].read(0)
            nbytes = read.backward_bytes if op.id == self.backward else read.forward_bytes
            op = replace(op, zero_copy=(*op.zero_copy, weight), bytes=op.bytes + nbytes)
        elif op.kind == "update" and delayed:
            after.update(self.uses)  # as for all gradients
        elif op in self.sends or op in self.adds or op in self.updates:
            after.update(self.uses)  # of the pass before
            op = replace(op, rows="others")
        elif first in after and op.payload == "weight":
            after.add(last)
        return replace(op, id=self._number(op.id), after=tuple(sorted(after)))

    def _new(self) -> Iterator[Op]:
        tensor, backward = self.profile.tensors[self.table], self.plan.ops[self.backward]
        sends, adds, updates = ({op.id for op in ops} for ops in (self.sends, self.adds, self.updates))
        new = partial(replace, step=backward.step, block=0, rows="looked up")
        yield new(
            self.sends[-1],
            id=self.at,
            passes=tuple(which for which in self.plan.passes if which != "settling"),
            groups=(len(self.plan.groups),),
            bytes=tensor.lookup_bytes,
            after=tuple(sorted({self._number(self.backward), *self.uses})),
            release_after=backward.step,
        )
        for op in self.adds:
            # Sums have the last block's gradient, and those of the passes before.
            after = {self.at, *sends, *adds, *self.uses}
            if self.plan.delayed:
                after |= {self._number(update) for update in updates}
            yield new(op, id=self.uses[0], passes=ADDING, after=tuple(sorted(after)))
        for op in () if self.plan.delayed else self.updates:
            yield new(op, id=self.uses[-1], after=tuple(sorted({self.at, *updates})))
