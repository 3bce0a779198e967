"""From a timetable to a plan: ops in issue order, and tensor groups.

What is decided here is the order within a step, nothing else; :mod:`lt_offload.schema.plan` says what
they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lt_offload.plan.assembly.copies import DeviceCopy
from lt_offload.plan.assembly.groups import group_tensors, take_slots
from lt_offload.plan.assembly.link import link
from lt_offload.plan.assembly.ops import ONE_BATCH, Emitter, TiedTable
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.iteration.durations import timed
from lt_offload.plan.iteration.memory import aligned
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.explain import KERNELS
from lt_offload.schema.plan import Pass, Plan, Prediction
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes

UNKNOWN = Prediction(iteration_s=0.0, lower_bound_s=0.0, no_offload_s=0.0, device_peak_bytes=0, host_peak_bytes=0)
"""Placeholder of a plan that has not been simulated yet."""


def build(
    timetable: Timetable,
    profile: Profile,
    *,
    planner: str,
    budget_bytes: int,
    host_budget_bytes: int,
    passes: tuple[Pass, ...] = ONE_BATCH,
    like: Plan | None = None,
    table: TiedTable | None = None,
) -> Plan:
    """Return the plan that carries out ``timetable``; its prediction is ``UNKNOWN``.

    Args:
        timetable: when and where everything is.
        profile: how long ops take: it may be of another speed than the one that the timetable was made for.
        planner: what to call the method.
        budget_bytes: of device memory.
        host_budget_bytes: of RAM.
        passes: the kinds of passes of the plan. For several the timetable is one for sums of gradients as states, and
            the plan one for two passes or, where updates wait, one pass per update; it suits any number.
        like: a plan for one batch with the same timetable, whose gradients arrive at the same addresses. Without it,
            they share no memory.
        table: one that is updated in two parts, if ``like`` is given: its rows arrive behind all other gradients.
    """
    decisions = timetable.sets.decisions
    emitter = Emitter(timetable, passes, table)
    emitter.emit()
    drafts = link(emitter)
    gradient_bytes = take_slots(emitter, like)
    grouped = group_tensors(
        drafts,
        emitter.initial,
        weight_bytes=[aligned(tensor.bytes) for tensor in profile.tensors],
        state_bytes=[emitter.room_of("state", t) for t in range(len(profile.tensors))],
        sum_bytes=[aligned(tensor.bytes) * tensor.trainable for tensor in profile.tensors] if emitter.adds_up else (),
        first_block=[tensor.blocks[0] for tensor in profile.tensors],
    )
    plan = Plan(
        fingerprint=profile.fingerprint,
        model=profile.model,
        planner=planner,
        batch_size=profile.batch_size,
        sequence_length=profile.sequence_length,
        parts=profile.parts,
        tile_tokens=profile.tile_tokens,
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        options=decisions.options,
        update_places=tuple(tensor.place for tensor in decisions.tensors),
        timeline=timeline(profile).steps,
        groups=grouped.groups,
        initial=grouped.initial,
        ops=grouped.ops,
        arena_bytes=timetable.arena_bytes,
        gradient_bytes=gradient_bytes,
        predicted=UNKNOWN,
        estimated=profile.estimated,
        flops_per_token=profile.flops_per_token,
        peak_flops_per_s=profile.peak_flops_per_s,
        host_threads=profile.optimizer.host_threads,
        host_kernel=profile.optimizer.host_kernel,
        context_bytes=profile.hardware.context_bytes + profile.page_table_bytes,
        process_bytes=profile.hardware.process_bytes,
        processes=profile.processes * profile.machines,
        chunk_tokens=profile.blocks[-1].option(decisions.options[-1]).chunk_tokens,
        graphed=tuple(index for index, block in enumerate(profile.blocks) if block.graphed),
        notes=tuple(_notes(timetable.copies, profile)),
        window=2 if emitter.adds_up and not emitter.delayed else 1,
        delayed=emitter.delayed,
    )
    # What it takes to read a table is known to the profile in which it is one.
    return timed(plan, profile) if table is None else plan


def _notes(copies: Sequence[DeviceCopy], profile: Profile) -> Iterator[str]:
    if profile.kernels:
        yield f"{KERNELS}{profile.kernels}; numbers are exactly those of the model with them, not transformers' own"
    for payload, total in (
        ("weight", sum(tensor.bytes for tensor in profile.tensors)),
        ("state", sum(tensor.state_bytes for tensor in profile.tensors)),
    ):
        always = sum(copy.bytes for copy in copies if copy.payload == payload and copy.stay is None)
        if total:
            sums = " and sums of gradients" if any(tensor.sum_bytes for tensor in profile.tensors) else ""
            what = "weights" if payload == "weight" else f"optimizer states{sums}"
            yield f"{format_bytes(always)} of {format_bytes(total)} of {what} are always on the device"
    fixed = {
        "before the first tensor": profile.hardware.context_bytes,
        "for page tables of host memory": profile.page_table_bytes,
        "for what all blocks share": profile.shared_bytes,
        "for the allocator's slack": profile.slack_bytes,
    }
    parts = [f"{format_bytes(nbytes)} {what}" for what, nbytes in fixed.items() if nbytes]
    if parts:
        share = f"; at least {profile.slack_share:.0%} of all is slack" if profile.slack_share else ""
        yield f"taken by every plan: {', '.join(parts)}{share}"
