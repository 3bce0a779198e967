"""Embeddings read in host memory: their forward needs the rows of one batch, their backward none.

One ingredient of MemFerry (2024) that any plan may use: a table that the host updates is not copied to the device.
"""

from __future__ import annotations

from dataclasses import replace

from lt_offload.plan.iteration.decisions import Choices, Stay, TensorChoice, uses
from lt_offload.plan.planners.request import Request
from lt_offload.schema.profile import Profile, TensorProfile


def embedding_steps(profile: Profile, tensor: TensorProfile) -> tuple[int, ...]:
    """Return the steps in which embeddings use ``tensor``, ascending."""
    blocks = tuple(block for block in tensor.blocks if profile.blocks[block].kind == "embedding")
    return tuple(uses(blocks, profile))


def direct_embeddings(choices: Choices, request: Request) -> Choices | None:
    """Return ``choices`` with the embeddings that the host updates read in host memory; None if there are none.

    Of a table that is the output projection as well, the other uses keep their device copies, which come later.
    Frozen tables that travel are read directly too.
    """
    profile = request.profile
    total = 2 * len(profile.blocks)
    tensors = list(choices.tensors)
    for index, (tensor, choice) in enumerate(zip(profile.tensors, choices.tensors, strict=True)):
        travels = choice.place == "host" or (choice.place == "none" and choice.stays)
        if travels and tensor.direct is not None:
            needed = uses(tensor.blocks, profile)
            tensors[index] = _read_directly(choice, embedding_steps(profile, tensor), needed, total)
    if tensors == list(choices.tensors):
        return None
    return replace(choices, tensors=tuple(tensors))


def _read_directly(choice: TensorChoice, steps: tuple[int, ...], needed: list[int], total: int) -> TensorChoice:
    direct = tuple(sorted({*choice.direct, *steps}))
    before = [step for step in needed if step not in choice.direct]
    after = [step for step in needed if step not in direct]
    stays = [_without(stay, before, after, total) for stay in choice.stays]
    return replace(choice, direct=direct, stays=tuple(stay for stay in stays if stay is not None))


def _without(stay: Stay, before: list[int], after: list[int], total: int) -> Stay | None:
    """Return ``stay`` as long ahead of, and as long behind, what still needs it; None if nothing does."""
    length = (stay.end - stay.start) % total
    was = sorted(since for step in before if (since := (step - stay.start) % total) <= length)
    now = sorted(since for step in after if (since := (step - stay.start) % total) <= length)
    if not now:
        return None
    return Stay(
        start=(stay.start + now[0] - was[0]) % total,
        end=(stay.end - (was[-1] - now[-1])) % total,
    )
