"""How many bytes a plan takes on the device, step by step, and on the host. Decides nothing.

The device holds the arena (constant), what is there before the first tensor, and what the framework allocates:
activations, workspaces and gradients. Everything is counted in the order of issue, because that is the order in which
memory is taken and given back, whenever the device gets round to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.schedule import Plan, UpdatePlace
from lt_offload.profile.types import OptionName, Profile, TensorProfile

COLLECTED_BELOW = 16 << 20
"""Gradients smaller than this are collected before an update on the device uses them up."""

Bytes = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What decides about the framework's memory."""

    options: tuple[OptionName, ...]
    places: tuple[UpdatePlace, ...]
    grad_until: dict[int, int] = field(default_factory=dict)
    """Per tensor that the host updates: the step at whose end its gradient has left."""
    left: dict[int, int] = field(default_factory=dict)
    """Per block with offloaded activations: the step at whose end they have left."""
    fetched: dict[int, int] = field(default_factory=dict)
    """And the step in which they take device memory again."""


def usage(plan: Plan) -> Usage:
    """Return what ``plan`` says about the framework's memory."""
    found = Usage(options=plan.options, places=plan.update_places)
    for op in plan.ops:
        if op.payload == "grad" and op.until is not None:
            found.grad_until.update(dict.fromkeys(op.tensors, op.until))
        elif op.payload == "activation":
            if op.kind == "prefetch":
                found.fetched[op.block] = op.step
            elif op.until is not None:
                found.left[op.block] = op.until
    return found


def backward_steps(blocks: tuple[int, ...], profile: Profile) -> list[int]:
    """Return the steps in which the backward of ``blocks`` does something, ascending."""
    last = 2 * len(profile.blocks) - 1
    return sorted(last - block for block in blocks if profile.blocks[block].has_backward)


def framework_bytes(used: Usage, profile: Profile) -> Bytes:
    """Return, per step, the most bytes that the framework's allocator holds."""
    return _activation_bytes(used, profile) + _gradient_bytes(used, profile)


def fixed_bytes(profile: Profile) -> int:
    """Return the device bytes that no plan changes: what is there before the first tensor, what all blocks share."""
    return profile.hardware.context_bytes + profile.shared_bytes


def device_bytes(plan: Plan, profile: Profile) -> Bytes:
    """Return, per step, the most bytes that the process holds on the device."""
    return framework_bytes(usage(plan), profile) + (plan.arena_bytes + fixed_bytes(profile))


def host_bytes(options: tuple[OptionName, ...], places: tuple[UpdatePlace, ...], profile: Profile) -> int:
    """Return the bytes of RAM that hold weights, optimizer states, gradients and activations.

    States that stay on the device have a host copy as well: it is needed when they make room for a validation.
    """
    total = sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    total += sum(tensor.bytes for tensor, place in zip(profile.tensors, places, strict=True) if place == "host")
    for block, option in zip(profile.blocks, options, strict=True):
        total += block.option(option).offload_bytes if block.has_backward else 0
    return total


def _activation_bytes(used: Usage, profile: Profile) -> Bytes:
    steps = 2 * len(profile.blocks)
    total = np.zeros(steps, dtype=np.int64)
    for index, block in enumerate(profile.blocks):
        option = block.option(used.options[index])
        forward, backward = index, steps - 1 - index
        total[forward] += block.input_bytes + block.output_bytes + option.forward_peak_bytes
        if not block.has_backward:
            continue
        total[forward : backward + 1] += option.saved_bytes
        if option.keeps_input:
            total[forward + 1 : backward] += block.input_bytes
        # the input, its gradient, and the gradient of the output
        total[backward] += 2 * block.input_bytes + block.output_bytes + option.backward_peak_bytes
        if index in used.left:
            total[forward + 1 : used.left[index] + 1] += option.offload_bytes
        if index in used.fetched:
            total[used.fetched[index] : backward] += option.offload_bytes
    return total


def _gradient_bytes(used: Usage, profile: Profile) -> Bytes:
    """Gradients held (for the host, or until the last use of a tied tensor), and those that pass by in a backward."""
    held, large, small = np.zeros((3, 2 * len(profile.blocks)), dtype=np.int64)
    for index, (tensor, place) in enumerate(zip(profile.tensors, used.places, strict=True)):
        uses = backward_steps(tensor.blocks, profile) if tensor.trainable else []
        if not uses:
            continue
        if len(uses) > 1:
            held[uses[0] : uses[-1] + 1] += tensor.bytes
        if place == "host":
            begin = uses[-1] + 1 if len(uses) > 1 else uses[-1]
            held[begin : used.grad_until.get(index, uses[-1]) + 1] += tensor.bytes
        for step in uses:
            passing = _passing_bytes(tensor, place, profile, first=step == uses[0], last=step == uses[-1])
            if tensor.bytes < COLLECTED_BELOW:
                small[step] += passing
            else:
                large[step] = max(large[step], passing)
    total: Bytes = held + small + large
    return total


def _passing_bytes(tensor: TensorProfile, place: str, profile: Profile, *, first: bool, last: bool) -> int:
    """Bytes that one backward takes for the tensor's gradient, beyond what is held over steps."""
    tied = not (first and last)
    new = tensor.bytes if (tied and not first) or (not tied and place != "host") else 0
    scratch = int(tensor.bytes * profile.optimizer.scratch_ratio) if last and place != "host" else 0
    # The second gradient of a tied tensor is added to the first and gone before the update begins.
    return max(new, scratch) if tied else new + scratch
