"""The record of a step: the calls of its blocks, and the memory and time outside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lt_offload.errors import ModelError
from lt_offload.model.blocks import Block, CalledOtherwise, Structure
from lt_offload.model.calls import Call
from lt_offload.profiling.step.logits import Tail
from lt_offload.profiling.step.model_call import Seam
from lt_offload.schema.profile import OptionName

Run = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """One run of the model."""

    structure: Structure
    """The blocks in the order of their calls."""
    unrecorded: Set[int]
    """Calls of which a run has kept no graph, by their identity."""
    others: list[tuple[int, Call]]
    """Calls of modules that turned out to be no blocks, in the largest forward, each with the block that follows it."""
    calls: tuple[Call, ...]
    """One per block; blocks that cost the same share one."""
    chained: tuple[bool, ...]
    """Per block: its activations are the untouched results of the block before."""
    seams: tuple[Seam, ...]
    """Per block: the model's own code before it."""
    outside: int
    """Bytes outside the blocks that plans count in every step: masks, tables and tensors saved between blocks, which
    live until the backward; the model's result, which its caller may hold until the next call of the model; what
    outlives the step (blocks' outputs with the gradients that they retain, all else in an attribute or a list); what
    deferred forwards keep until their backward (inputs of blocks, gradients of outputs, activations that several blocks
    are given with their gradients); gradients that the loss itself gives blocks before the last one."""
    once: tuple[bool, ...]
    """Per block: it must not run a second time for its backward, nor without a graph."""
    tail: Tail
    """Without what ``outside`` has of it."""
    after: Tail
    """The same of all that follows the model's own loss, without that loss: other losses, other models."""
    with_loss: Mapping[OptionName, Call]
    """Call of the last block by option under which it computes the loss, too. Empty if it may not."""
    forwards: int
    """Calls of the model with gradients; figures of blocks are those of the largest one."""
    deferred: int
    """Number of forwards that another forward follows before their backward."""


def find_loss(result: Any) -> Tensor | None:
    """Return the loss in what a model or a training step returned, if there is one."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", result[0] if isinstance(result, Sequence) and result else None)
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def in_turn(blocks: Sequence[Block], called: Sequence[int], apart: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """Return the calls of blocks that are called once per forward, in one order, and that order.

    ``apart`` are none.

    Raises:
        CalledOtherwise: if there is no layer.
        ModelError: if layers are called more than once, or in another order in a later forward.
    """
    times = Counter(called)
    layers = [index for index, block in enumerate(blocks) if block.kind == "layer" and index not in apart]
    if not any(times[index] for index in layers):
        uncalled = ", ".join(blocks[index].name for index in layers)
        raise CalledOtherwise(f"the model's forward has called none of its layers, {uncalled}", ())
    forwards = min(times[index] for index in layers if times[index])
    # What is called more often has no place in the sequence, nor has what owns the same tensors.
    others = {index for index in times if times[index] != forwards or index in apart}
    tensors = {tensor for index in others for tensor in blocks[index].tensors}
    visits = [at for at, i in enumerate(called) if i not in others and tensors.isdisjoint(blocks[i].tensors)]
    turn = [called[at] for at in visits[: len(visits) // forwards]]
    for index in dict.fromkeys(called):
        if blocks[index].kind == "layer" and index not in turn and index not in apart:
            raise ModelError(
                f"the model calls block {blocks[index].name} {times[index]} times in {forwards} forwards, or shares "
                "its weights with one that it calls more often; layers must be called once each"
            )
    if [called[at] for at in visits] != turn * forwards:
        names = ", ".join(blocks[index].name for index in turn)
        raise ModelError(f"the model calls its blocks in another order than {names} in a later forward")
    return visits, turn
