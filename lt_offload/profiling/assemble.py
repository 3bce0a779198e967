"""The profile of a model, put together from one observed step and the costs of its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.hugging_face import is_base
from lt_offload.compat.torch import tree_leaves
from lt_offload.machine.accounting import storage_bytes
from lt_offload.machine.driver import page_table_bytes
from lt_offload.model.blocks import Block, Structure
from lt_offload.model.calls import Call
from lt_offload.model.compiled import kernels_of
from lt_offload.model.parts import extent
from lt_offload.model.quantized import is_packed
from lt_offload.model.tiles import tokens_of
from lt_offload.profiling.block_cost import BlockCost, discard
from lt_offload.profiling.flops import flops_per_token
from lt_offload.profiling.host_reads import Readers
from lt_offload.profiling.optimizer import UpdateSizes
from lt_offload.profiling.step.logits import Tail
from lt_offload.profiling.step.model_call import Seam
from lt_offload.schema.profile import (
    RECORDED,
    BlockProfile,
    HardwareProfile,
    OptimizerProfile,
    OptionName,
    OptionProfile,
    Profile,
    TensorProfile,
)
from lt_offload.units import dtype_name

ALLOCATOR_SLACK = 0.02
"""Part of the memory of a GPU that plans leave to torch's allocator; an emulated device has none."""

LEAST_SLACK = (3 * 20 + 2) << 20
"""Bytes that plans for a GPU leave to torch's allocator at least. It maps 20 MiB at a time, and 2 MiB for small
tensors: pieces that the arena ends in, that what runs begins and ends in, and that small tensors are in."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """One run of the model."""

    structure: Structure
    """The blocks in the order of their calls."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The costs of a model's blocks, and of the computations outside them."""

    captured: Capture
    costs: list[BlockCost]
    """One per block."""
    with_loss: list[BlockCost]
    """One per option by which the last block computes the loss, too."""
    readers: Readers
    parts: int


def assemble(
    model: nn.Module,
    batch: Any,
    measured: Measured,
    *,
    sizes: UpdateSizes,
    updates: OptimizerProfile,
    hardware: HardwareProfile,
) -> Profile:
    """Return the profile of a model that has been measured."""
    structure = measured.captured.structure
    batch_size, sequence_length = extent(batch)
    gpu = hardware.context_bytes > 0
    # Each counts by the seconds that it takes.
    spans = [
        (cost.scatter, option.forward_s + option.backward_s) for cost in measured.costs for option in cost.options[:1]
    ]
    seconds = sum(span for _, span in spans)
    # Host copies of all tensors, once they are page-locked, take page tables on the device. Wherever a tensor is
    # updated, its weight has a host copy, and either its states have one, too, or its gradient.
    tables = (
        page_table_bytes(p.nbytes + (max(p.nbytes, sizes.state(p)) if p.requires_grad else 0))
        for _, p in structure.tensors
    )
    # Updates of parameters outside the blocks follow the last backward: of that nothing but gradients on their way to
    # the host may be left.
    between = sizes.scratch_of_all([parameter for _, parameter in structure.rest], updates.scratch_ratio)
    blocks = [*_block_profiles(structure, measured)]
    last = next((index for index, block in enumerate(blocks) if block.has_backward), None)
    if last is not None and between:
        blocks[last] = _backward_of(blocks[last], structure.blocks[last], between)
    return Profile(
        model=type(next(filter(is_base, model.modules()), model)).__name__,
        dtype=_main_dtype(model),
        batch_size=batch_size,
        sequence_length=sequence_length,
        tensors=_tensor_profiles(structure, sizes, measured.readers, hardware),
        blocks=tuple(blocks),
        optimizer=updates,
        hardware=hardware,
        shared_bytes=measured.captured.outside
        + storage_bytes(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        + storage_bytes(model.buffers())
        # What lies outside the blocks stays on the device with its gradient and its states.
        + sum(p.nbytes * (2 if p.requires_grad else 1) + sizes.state(p) for _, p in structure.rest),
        page_table_bytes=sum(tables) if gpu else 0,
        slack_bytes=max(
            LEAST_SLACK if gpu else 0, *(cost.slack_bytes for cost in (*measured.costs, *measured.with_loss))
        ),
        slack_share=ALLOCATOR_SLACK if gpu else 0.0,
        forwards=measured.captured.forwards,
        deferred_forwards=measured.captured.deferred,
        scatter=sum(scatter * span for scatter, span in spans) / seconds if seconds > 0 else 0.0,
        flops_per_token=flops_per_token(model, sequence_length) or 0.0,
        parts=measured.parts,
        kernels=kernels_of(model),
        tile_tokens=tokens_of(model),
    )


def _block_profiles(structure: Structure, measured: Measured) -> tuple[BlockProfile, ...]:
    captured, costs = measured.captured, measured.costs
    profiles: list[BlockProfile] = []
    arrived = 0
    tail = captured.tail
    for index, (block, call, cost) in enumerate(zip(structure.blocks, captured.calls, costs, strict=True)):
        last = index == len(costs) - 1
        # The previous block's output stays while a block runs that does not take it (a second embedding).
        waiting = arrived if not call.slots else 0
        grad = max((p.nbytes for p in block.module.parameters() if p.requires_grad), default=0)
        options = [_with_tail(option, cost.output_bytes, tail, grad) if last else option for option in cost.options]
        chained = captured.chained[index]
        once = captured.once[index]
        nothing = discard(cost) if chained and not last else None
        options += [nothing] if nothing else []
        with_loss = [option for cost in measured.with_loss for option in cost.options] if last else []
        if captured.after.forward_peak:  # computations behind the model's own loss
            charged = [(_with_tail(option, 0, captured.after, 0), option.before_loss_bytes) for option in with_loss]
            with_loss = [replace(option, before_loss_bytes=nbytes) for option, nbytes in charged]
        options += with_loss
        options = [option for option in options if option.name in RECORDED or not once]
        profiles.append(
            BlockProfile(
                name=block.name,
                kind=block.kind,
                input_bytes=cost.input_bytes,
                output_bytes=0 if last else cost.output_bytes,
                launch_s=cost.launch_s + (max(tail.forward.launch_s, tail.backward.launch_s) if last else 0.0),
                options=tuple(_raised(option, waiting, captured.seams[index].lingering) for option in options),
                has_backward=call.has_backward,
                graphed=call.other_kernels,
                chained=chained,
            )
        )
        arrived = cost.output_bytes
    return _with_seams(profiles, structure, captured)


def _with_seams(blocks: list[BlockProfile], structure: Structure, captured: Capture) -> tuple[BlockProfile, ...]:
    """Return ``blocks`` with room for the short-lived memory of the model's own code between them."""
    profiles = [*blocks]
    uses = Counter(p for seam in captured.seams for p in seam.rest)
    for index, seam in enumerate(captured.seams):
        block = profiles[index]
        least = seam.forward + seam.lingering - block.output_bytes
        options = tuple(
            replace(option, forward_peak_bytes=max(option.forward_peak_bytes, least)) for option in block.options
        )
        profiles[index] = replace(block, options=options)
        # Gradients that come from several places are added up: both, their sum, and that of earlier batches.
        nbytes = seam.backward + 2 * sum(p.nbytes for p in seam.rest if uses[p] > 1)
        with_backward = [at for at in range(index + 1) if blocks[at].has_backward]
        if nbytes and with_backward:
            # It comes right before the backward of the block before, which may have none.
            at = next((at for at in reversed(with_backward) if at < index), with_backward[-1])
            profiles[at] = _backward_of(profiles[at], structure.blocks[at], nbytes - profiles[at].input_bytes)
    return tuple(profiles)


def _backward_of(profile: BlockProfile, block: Block, nbytes: int) -> BlockProfile:
    """Return ``profile`` with a backward that takes ``nbytes`` at least, input and output of the block among them."""
    grads = [p.nbytes for p in block.module.parameters() if p.requires_grad]
    least = nbytes - profile.input_bytes - profile.output_bytes
    return replace(profile, options=tuple(at_least(option, least, grads) for option in profile.options))


def _with_tail(option: OptionProfile, output_bytes: int, tail: Tail, grad_bytes: int) -> OptionProfile:
    """Charge the loss to the last block, whose output of ``output_bytes`` nobody else counts.

    Plans add at least the block's largest gradient (``grad_bytes``) to the peak of its backward. While the loss is
    differentiated that gradient does not exist yet, so as much of the peak is left out.
    """
    block_forward = option.forward_peak_bytes + output_bytes
    block_backward = option.backward_peak_bytes + tail.left

    def whole(peak: int | None) -> int | None:
        return None if peak is None else max(peak + tail.left, tail.backward_peak, tail.saved) - tail.saved

    return replace(
        option,
        forward_s=option.forward_s + tail.forward.seconds,
        backward_s=option.backward_s + tail.backward.seconds,
        saved_bytes=option.saved_bytes + tail.saved,
        forward_peak_bytes=max(block_forward, tail.forward_peak) - tail.saved,
        before_loss_bytes=max(block_forward - tail.saved, 0),
        backward_peak_bytes=max(block_backward, tail.backward_peak - grad_bytes, tail.saved) - tail.saved,
        held_peak_bytes=whole(option.held_peak_bytes),
        passing_peak_bytes=whole(option.passing_peak_bytes),
    )


def at_least(option: OptionProfile, nbytes: int, grads: Sequence[int]) -> OptionProfile:
    """Return ``option`` whose backward takes ``nbytes`` at least, beside gradients of the sizes ``grads``."""
    held, passing = option.held_peak_bytes, option.passing_peak_bytes
    return replace(
        option,
        backward_peak_bytes=max(option.backward_peak_bytes, nbytes),
        held_peak_bytes=None if held is None else max(held, nbytes + sum(grads)),
        passing_peak_bytes=None if passing is None else max(passing, nbytes + max(grads, default=0)),
    )


def _raised(option: OptionProfile, by: int, in_forward: int) -> OptionProfile:
    before_loss = None if option.before_loss_bytes is None else option.before_loss_bytes + in_forward
    return replace(option.more(forward=in_forward, backward=by), before_loss_bytes=before_loss)


def _tensor_profiles(
    structure: Structure, sizes: UpdateSizes, readers: Readers, hardware: HardwareProfile
) -> tuple[TensorProfile, ...]:
    return tuple(
        TensorProfile(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            bytes=parameter.nbytes,
            trainable=parameter.requires_grad,
            blocks=tuple(number for number, block in enumerate(structure.blocks) if index in block.tensors),
            state_bytes=sizes.state(parameter),
            scratch_bytes=sizes.scratch(parameter),
            zero_copy=readers.profile(index, hardware),
            lookup_bytes=readers.looked_up(index) if sizes.by_rows(parameter) else 0,
        )
        for index, (name, parameter) in enumerate(structure.tensors)
    )


def _main_dtype(model: nn.Module) -> str:
    totals: dict[torch.dtype, int] = {}
    # Packed numbers and pieces of stored weights are bytes, which is no dtype that anything is computed in.
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_packed(parameter):
            totals[parameter.dtype] = totals.get(parameter.dtype, 0) + parameter.numel()
    return dtype_name(max(totals, key=lambda dtype: totals[dtype]))
