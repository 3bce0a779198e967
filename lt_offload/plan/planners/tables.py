"""Tables read in host memory: computations that need some rows of a tensor do not have it copied.

Embeddings need the rows of a batch's tokens, in the forward alone; stored experts (``model/forms``) need those to which
a router sends tokens. One ingredient of MemFerry (2024) that any plan may use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision, uses
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.request import Request
from lt_offload.schema.profile import Profile, TensorProfile


def embedding_steps(profile: Profile, tensor: TensorProfile) -> tuple[int, ...]:
    """Return the steps in which embeddings use ``tensor``, ascending."""
    blocks = tuple(block for block in tensor.blocks if profile.blocks[block].kind == "embedding")
    return tuple(uses(blocks, profile))


def table_steps(profile: Profile, tensor: TensorProfile) -> tuple[int, ...]:
    """Return the steps in which embeddings use ``tensor``, or blocks that need some of its rows, ascending."""
    if tensor.zero_copy is None:
        return ()
    blocks = tuple(b for b in tensor.blocks if 0 < tensor.read(b).forward_bytes < tensor.bytes)
    return tuple(sorted({*embedding_steps(profile, tensor), *uses(blocks, profile)}))


def lookups(profile: Profile) -> tuple[int, ...]:
    """Return the frozen tensors that embeddings alone use, and can read in host memory."""
    return tuple(
        index
        for index, tensor in enumerate(profile.tensors)
        if not tensor.trainable
        and tensor.zero_copy is not None
        and tensor.blocks
        and all(profile.blocks[block].kind == "embedding" for block in tensor.blocks)
    )


def with_lookups(decisions: Decisions, profile: Profile) -> Decisions:
    """Return ``decisions`` with every one of the :func:`lookups` read in host memory, and never copied."""
    tensors = list(decisions.tensors)
    for index in lookups(profile):
        steps = embedding_steps(profile, profile.tensors[index])
        tensors[index] = TensorDecision(place="none", stays=(), zero_copy=steps)
    return replace(decisions, tensors=tuple(tensors))


def read_tables(decisions: Decisions, request: Request) -> Iterator[tuple[str, Decisions]]:
    """Yield ``decisions`` with tables read in host memory, by name: embeddings alone, and all tables.

    Where a table is the output projection as well, its other uses keep their device copies, which come later. Trained
    ones are read if the host updates them, frozen ones if they travel. What changes nothing is left out.
    """
    ways = {"embeddings": embedding_steps, "tables": table_steps}
    before = decisions
    for name, steps in ways.items():
        after = _read(decisions, request.profile, steps)
        if after != before:
            yield name, after
            before = after


def _read(
    decisions: Decisions, profile: Profile, steps_of: Callable[[Profile, TensorProfile], tuple[int, ...]]
) -> Decisions:
    total = len(timeline(profile))
    tensors = list(decisions.tensors)
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        travels = decision.place == "host" or (decision.place == "none" and decision.stays)
        steps = steps_of(profile, tensor)
        if travels and steps and tensor.zero_copy is not None:
            tensors[index] = _read_directly(decision, steps, uses(tensor.blocks, profile), total)
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
