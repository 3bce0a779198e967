"""Embeddings read in host memory: their forward needs the rows of one batch, their backward none.

One ingredient of MemFerry (2024) that any plan may use: a table that the host updates is not copied to the device.
"""

from __future__ import annotations

from dataclasses import replace

from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision, uses
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.request import Request
from lt_offload.schema.profile import Profile, TensorProfile


def embedding_steps(profile: Profile, tensor: TensorProfile) -> tuple[int, ...]:
    """Return the steps in which embeddings use ``tensor``, ascending."""
    blocks = tuple(block for block in tensor.blocks if profile.blocks[block].kind == "embedding")
    return tuple(uses(blocks, profile))


def zero_copy_embeddings(decisions: Decisions, request: Request) -> Decisions | None:
    """Return ``decisions`` with the embeddings that the host updates read in host memory; None if there are none.

    Where a table is the output projection as well, its other uses keep their device copies, which come later.
    Frozen tables that travel are read directly too.
    """
    profile = request.profile
    total = len(timeline(profile))
    tensors = list(decisions.tensors)
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        travels = decision.place == "host" or (decision.place == "none" and decision.stays)
        steps = embedding_steps(profile, tensor)
        if travels and steps and tensor.zero_copy is not None:
            tensors[index] = _read_directly(decision, steps, uses(tensor.blocks, profile), total)
    if tensors == list(decisions.tensors):
        return None
    return replace(decisions, tensors=tuple(tensors))


def _read_directly(decision: TensorDecision, steps: tuple[int, ...], needed: list[int], total: int) -> TensorDecision:
    zero_copy = tuple(sorted({*decision.zero_copy, *steps}))
    copied = [step for step in needed if step not in zero_copy]
    stays = [_around(stay, copied, total) for stay in decision.stays]
    return replace(decision, zero_copy=zero_copy, stays=tuple(stay for stay in stays if stay is not None))


def _around(stay: Interval, copied: list[int], total: int) -> Interval | None:
    """Return the part of ``stay`` from the first to the last step that needs it; None if none does."""
    length = (stay.end - stay.start) % total
    inside = sorted(since for step in copied if (since := (step - stay.start) % total) <= length)
    if not inside:
        return None
    return Interval(start=(stay.start + inside[0]) % total, end=(stay.start + inside[-1]) % total)
