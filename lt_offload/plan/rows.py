"""Tied embeddings by rows: a table in which the first block looks rows up, and which is the last block's matrix.

Its gradient is complete at the end of the backward, so its update, and copies that wait for it, would end an iteration
with nothing to hide behind, and until then its gradient would be held. But only rows of this batch's tokens have a
gradient of the first block. All others are those of a matrix of the last block alone: :func:`as_head` makes a profile
of that, for which any planner plans, and :func:`in_two_parts` writes such a plan with what the rows of the batch need
at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

from lt_offload.errors import UnsupportedError
from lt_offload.plan.assembly.copies import DeviceCopy
from lt_offload.plan.assembly.ops import TiedTable
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.iteration.memory import aligned
from lt_offload.plan.planners.candidates import Candidate
from lt_offload.plan.planners.request import DEFAULTS
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import ALIGNMENT, Pass, Plan
from lt_offload.schema.profile import BlockProfile, Profile, ReadProfile


def table_of(profile: Profile, settings: Settings = DEFAULTS) -> int | None:
    """Return the table that may be updated by rows; None if there is none, or several processes share it.

    Args:
        profile: without sums of gradients, also for plans that add them up.
        settings: which planner plans, and whether the host may update.
    """
    tables = [
        index
        for index, tensor in enumerate(profile.tensors)
        if tensor.lookup_bytes and tensor.zero_copy and not tensor.sum_bytes
    ]
    allowed = settings.planner in ("auto", "offmate") and settings.host_update and profile.processes == 1
    return tables[0] if len(tables) == 1 and allowed else None


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
    """Return the RAM that :func:`in_two_parts` adds to a plan; ``sums``: to one that adds gradients up."""
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


def in_two_parts(candidate: Candidate, profile: Profile, table: TiedTable, passes: tuple[Pass, ...]) -> Plan:
    """Return the plan of ``candidate`` with ``table`` updated in two parts, checked, with durations of its profile.

    If it fetches the table again in the iteration that updates it, before its last rows are there, the next iteration
    does that, in the step that the simulator likes best of a few. Nothing else needs its place until it is used.

    Args:
        candidate: a plan for ``profile`` and one batch.
        profile: of :func:`as_head`, with sums or without.
        table: the table, with the profile that the result is for.
        passes: the kinds of passes of the result.

    Raises:
        UnsupportedError: if the host does not update the table by ops of its own.
    """
    timetable, whole, tensor = candidate.timetable, table.profile, table.tensor
    sets = timetable.sets
    update = sets.update_step[table.index]
    # A forward that ran again in the backward would look rows up that have been updated.
    again = any(run.block == 0 for runs in sets.decisions.recomputations.values() for run in runs)
    if again or [table.index] not in sets.gradients[update]:
        raise UnsupportedError(f"{tensor.name} is not updated in two parts")
    early = {
        copy
        for copy in timetable.copies
        if (copy.payload, copy.tensor) == ("weight", table.index) and copy.stay is not None and copy.arrival > update
    }
    choices = [timetable]
    if early and "settling" not in passes:
        choices = [_fetched(timetable, early, step) for step in _starts(len(whole.blocks))]
    room = room_of_rows(whole, table.index, sums=len(passes) > 1)
    plans = []
    for choice in choices:
        plan = candidate.written(profile, passes, choice, table)
        plan = replace(
            plan,
            fingerprint=whole.fingerprint,
            host_budget_bytes=plan.host_budget_bytes + room,
            gradient_bytes=plan.gradient_bytes + room,
            notes=(*plan.notes, f"{tensor.name} is updated in two parts: {_PARTS}"),
        )
        plans.append(timed(plan, whole))
    plans = [plan for plan in plans if not check(plan, whole)]
    if not plans:
        raise UnsupportedError(f"{tensor.name} cannot be updated in two parts in {candidate.plan.planner}'s plan")
    return min(plans, key=lambda plan: simulate(plan, whole).iteration_time)


_PARTS = "rows that the batch does not look up as soon as the last block's gradient is there, the others at the end"


def _starts(blocks: int) -> Iterator[int]:
    """Yield steps in which the next iteration may fetch the table, before the last block needs it."""
    yield 0
    yield from takewhile(lambda step: step < blocks, (1 << power for power in count()))


def _fetched(timetable: Timetable, early: set[DeviceCopy], step: int) -> Timetable:
    copies = tuple(replace(copy, arrival=step) if copy in early else copy for copy in timetable.copies)
    return replace(timetable, copies=copies)
