"""A profile as the chain of POFO (NeurIPS 2021), and sequences on that chain as decisions about blocks.

The blocks between the first one that matters and the loss become layers, one block each, or several where there are
many blocks. Blocks before them keep their activations, as does the loss: the last block, or everything behind the
last layer. The paper's input of a layer is, in a plan, saved by two parties: what a block saved travels
with its option ``offload``, the input of a block that runs again with ``reload``. The memory of a plan therefore is not
quite that of its sequence; it has to be counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lt_offload.plan.iteration.computations import rerun_option
from lt_offload.plan.iteration.decisions import Decisions, Recomputation, resident_tensors
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.papers.pofo.chain import Chain, ChainLayer, Operation
from lt_offload.plan.planners.request import Allowed, NotApplicable
from lt_offload.schema.plan import Save
from lt_offload.schema.profile import OptionName, Profile

MOST_LAYERS = 64
"""Beyond, neighbouring blocks share a layer: the program's time grows with the square of the layers."""
_RERUN: dict[str, tuple[Save, Save]] = {
    "all": ("all", "all"),
    "checkpoint": ("input", "nothing"),
    "none": ("nothing", "nothing"),
}
"""By operation, what the first block of a layer saves when it runs again, and what its other blocks save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationLayout:
    """A profile's chain, and where its layers are."""

    chain: Chain
    layers: tuple[range, ...]
    """Blocks per layer."""
    held_bytes: int
    """Device bytes held by the blocks before the first layer from their forward to their backward."""


def as_chain(profile: Profile, allowed: Allowed) -> ActivationLayout:
    """Return the chain of ``profile``, whose blocks may use the ``allowed`` options.

    Raises:
        NotApplicable: if there is nothing to decide, or a block cannot keep its activations.
    """
    names = [{option.name for option in options} for options in allowed]
    for block, offered in zip(profile.blocks, names, strict=True):
        if block.has_backward and "keep" not in offered:
            raise NotApplicable(f"block {block.name} cannot keep its activations on the device")
    first, end = _core(profile)
    if first >= end:
        raise NotApplicable("no block between the first trainable parameter and the loss has activations to decide on")
    size = -(-(end - first) // MOST_LAYERS)
    layers = tuple(range(at, min(at + size, end)) for at in range(first, end, size))
    hardware = profile.hardware
    reads = profile.blocks[first].input_bytes
    before = [(profile.blocks[at], profile.blocks[at].option("keep")) for at in range(first) if _works(profile, at)]
    chain = Chain(
        layers=tuple(_layer(profile, blocks, names) for blocks in layers),
        loss=_loss(profile, range(end, len(profile.blocks))),
        input_bytes=reads,
        input_gradient_bytes=reads,
        bytes_per_s=min(hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s),
    )
    held = sum(option.saved_bytes + option.keeps_input * block.input_bytes for block, option in before)
    return ActivationLayout(chain=chain, layers=layers, held_bytes=held)


def as_decisions(
    operations: Sequence[Operation], layout: ActivationLayout, profile: Profile, allowed: Allowed
) -> Decisions:
    """Return the decisions of a sequence.

    A forward that directly precedes its layer's backward needs no rerun if the layer's input is saved: the backward
    does it.
    """
    options = _options(operations, layout, profile, allowed)
    recomputations: dict[int, tuple[Recomputation, ...]] = {}
    run: list[Operation] = []
    loss = next(at for at, operation in enumerate(operations) if operation.kind == "loss")
    for operation in operations[loss + 1 :]:
        if operation.kind == "prefetch":
            continue
        if operation.kind != "backward":
            run.append(operation)
            continue
        blocks = layout.layers[operation.layer - 1]
        # A single block that runs again right before its backward does
        # so by its option: that is no rerun of the plan.
        if run and not (len(run) == len(blocks) == 1):
            recomputations[timeline(profile).backward(blocks[-1])] = tuple(_reruns(run, layout))
        run = []
    return Decisions(tensors=resident_tensors(profile), options=tuple(options), recomputations=recomputations)


def _core(profile: Profile) -> tuple[int, int]:
    blocks = profile.blocks
    works = [at for at in range(len(blocks)) if _works(profile, at)]
    if not works:
        return 0, 0
    layers = [at for at in works if blocks[at].kind == "layer"]
    return (layers[0], min(layers[-1] + 1, len(blocks) - 1)) if layers else (works[0], len(blocks) - 1)


def _works(profile: Profile, block: int) -> bool:
    return profile.blocks[block].has_backward


def _layer(profile: Profile, blocks: range, names: Sequence[set[OptionName]]) -> ChainLayer:
    inside = [profile.blocks[at] for at in blocks]
    keeps = [block.option("keep") for block in inside]
    reads, output = inside[0].input_bytes, inside[-1].output_bytes
    # The paper counts a layer's output among what it saves; a profile counts it as the next block's input.
    saved = sum(keep.saved_bytes + block.output_bytes for keep, block in zip(keeps, inside, strict=True))
    light = max(
        rerun_option(block, "input").forward_peak_bytes + block.output_bytes + (block.input_bytes if at else 0)
        for at, block in enumerate(inside)
    )
    discards = [profile.blocks[at].chained and "discard" in names[at] for at in blocks]
    return ChainLayer(
        forward_s=sum(keep.forward_s for keep in keeps),
        backward_s=sum(keep.backward_s for keep in keeps) + _update_s(profile, blocks),
        output_bytes=output,
        saved_bytes=saved,
        gradient_bytes=output,
        saving_overhead_bytes=max(keep.forward_peak_bytes for keep in keeps),
        forward_overhead_bytes=light - output,
        backward_overhead_bytes=_backward_bytes(profile, blocks) - saved - output - 2 * reads,
        checkpoints="recompute" in names[blocks[0]] and all(discards[1:]),
        discards=all(discards),
        input_travels="reload" in names[blocks[0]],
        saved_travels=all("offload" in names[at] for at in blocks),
    )


def _loss(profile: Profile, blocks: range) -> ChainLayer:
    inside = [profile.blocks[at] for at in blocks]
    keeps = [block.option("keep") for block in inside]
    reads = inside[0].input_bytes
    saved = sum(keep.saved_bytes for keep in keeps) + sum(block.input_bytes for block in inside[1:])
    return ChainLayer(
        forward_s=sum(keep.forward_s for keep in keeps),
        backward_s=sum(keep.backward_s for keep in keeps) + _update_s(profile, blocks),
        output_bytes=0,
        saved_bytes=saved,
        gradient_bytes=0,
        saving_overhead_bytes=max(
            keep.forward_peak_bytes + block.output_bytes for keep, block in zip(keeps, inside, strict=True)
        ),
        backward_overhead_bytes=_backward_bytes(profile, blocks) - saved - 2 * reads,
    )


def _backward_bytes(profile: Profile, blocks: range) -> int:
    """Return the peak of the backwards of ``blocks``, all kept; the input is in it, and both gradients."""
    needed = held = 0
    for at in blocks:
        block, keep = profile.blocks[at], profile.blocks[at].option("keep")
        held += keep.saved_bytes + block.input_bytes
        passing = max((t.bytes for t in profile.tensors if t.trainable and at in t.blocks), default=0)
        needed = max(needed, held + block.input_bytes + block.output_bytes + keep.backward_peak_bytes + passing)
    return needed


def _update_s(profile: Profile, blocks: range) -> float:
    """Return the time of the updates that follow the backwards of ``blocks``: copies run on beside them."""
    # A tied tensor is updated behind the last of its backwards, which is that of its first block.
    nbytes = sum(t.bytes for t in profile.tensors if t.trainable and t.blocks[0] in blocks)
    return nbytes / profile.optimizer.device_bytes_per_s


def _options(
    operations: Sequence[Operation], layout: ActivationLayout, profile: Profile, allowed: Allowed
) -> list[OptionName]:
    names: list[OptionName] = ["keep" if _works(profile, at) else options[0].name for at, options in enumerate(allowed)]
    moved = {operation.layer for operation in operations if operation.kind == "offload"}
    for operation in operations:
        if operation.kind == "loss":
            return names
        blocks = layout.layers[operation.layer - 1]
        # An offload is of the input of a layer, which is what the layer before has saved.
        if operation.kind == "all" and operation.layer + 1 in moved:
            for at in blocks:
                names[at] = "offload"
        elif operation.kind in ("checkpoint", "none"):
            for at in blocks:
                names[at] = "discard"
            if operation.kind == "checkpoint":
                reloads = operation.layer in moved and any(o.name == "reload" for o in allowed[blocks[0]])
                names[blocks[0]] = "reload" if reloads else "recompute"
    raise AssertionError("a sequence has a loss")


def _reruns(run: Sequence[Operation], layout: ActivationLayout) -> list[Recomputation]:
    reruns = []
    for operation in run:
        first, others = _RERUN[operation.kind]
        blocks = layout.layers[operation.layer - 1]
        reruns += [Recomputation(block=at, save=others if at > blocks[0] else first) for at in blocks]
    return reruns
