"""How many bytes a plan takes on the device, computation by computation, and on the host. Decides nothing.

The device holds the arena (constant), what is there before the first tensor, and what the framework allocates:
activations, workspaces and gradients. Everything is counted in the order of issue, because that is the order in which
memory is taken and given back, whenever the device gets round to it. A step without forwards that run again is one
computation; otherwise its computations follow each other with different things alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.computations import SAVED, Computation, Rerun, computations
from lt_offload.plan.schedule import Plan, UpdatePlace
from lt_offload.profile.types import COLLECTED_BELOW, OptionName, Profile, TensorProfile

Bytes = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What decides about the framework's memory."""

    options: tuple[OptionName, ...]
    places: tuple[UpdatePlace, ...]
    grad_until: dict[int, int] = field(default_factory=dict)
    """Per tensor that the host updates: the step at whose end its gradient has left."""
    grad_direct: set[int] = field(default_factory=set)
    """Tensors whose gradients the backward writes to host memory itself."""
    left: dict[int, int] = field(default_factory=dict)
    """Per block with offloaded activations: the step at whose end they have left."""
    fetched: dict[int, int] = field(default_factory=dict)
    """And the step in which they take device memory again."""
    reruns: Mapping[int, tuple[Rerun, ...]] = field(default_factory=dict)
    """By backward step: the forwards that run again before its backward, in order."""


def usage(plan: Plan) -> Usage:
    """Return what ``plan`` says about the framework's memory."""
    again = reruns(plan)
    found = Usage(options=plan.options, places=plan.update_places, reruns=again)
    for op in plan.ops:
        if op.payload == "grad" and op.resource == "compute":
            found.grad_direct.update(op.tensors)
        elif op.payload == "grad" and op.until is not None:
            found.grad_until.update(dict.fromkeys(op.tensors, op.until))
        elif op.payload == "activation":
            if op.kind == "prefetch":
                found.fetched[op.block] = op.step
            elif op.until is not None:
                found.left[op.block] = op.until
    return found


def reruns(plan: Plan) -> dict[int, tuple[Rerun, ...]]:
    """Return, by step, the forwards that ``plan`` runs again."""
    found: dict[int, tuple[Rerun, ...]] = {}
    for op in plan.ops:
        if op.save is not None:
            found[op.step] = (*found.get(op.step, ()), Rerun(block=op.block, save=op.save))
    return found


def backward_steps(blocks: tuple[int, ...], profile: Profile) -> list[int]:
    """Return the steps in which the backward of ``blocks`` does something, ascending."""
    last = 2 * len(profile.blocks) - 1
    if len(blocks) == 1:  # nearly all tensors
        return [last - blocks[0]] if profile.blocks[blocks[0]].has_backward else []
    return sorted(last - block for block in blocks if profile.blocks[block].has_backward)


def framework_bytes(used: Usage, profile: Profile) -> Bytes:
    """Return, per step, the most bytes that the framework's allocator holds."""
    time = _Time(used, profile)
    return time.per_step(_framework_bytes(used, profile, time))


def room_within(budget: int, profile: Profile) -> int:
    """Return the device bytes of ``budget`` that a plan may use for what it decides about."""
    used = min(budget - profile.slack_bytes, int(budget / (1 + profile.slack_share)) + 1)
    while used + _slack(used, profile) > budget:
        used -= 1
    return used - _always(profile)


def budget_for(room: int, profile: Profile) -> int:
    """Return the smallest budget that leaves a plan ``room`` bytes."""
    used = room + _always(profile)
    return used + _slack(used, profile)


def _slack(used: int, profile: Profile) -> int:
    return max(profile.slack_bytes, int(used * profile.slack_share))


def _always(profile: Profile) -> int:
    """Return the device bytes that no plan changes: what is there before the first tensor, what all blocks share."""
    return profile.hardware.context_bytes + profile.page_table_bytes + profile.shared_bytes


def device_bytes(plan: Plan, profile: Profile) -> Bytes:
    """Return, per step, the most bytes that the process holds on the device."""
    return _with_fixed(framework_bytes(usage(plan), profile), plan, profile)


def computation_bytes(plan: Plan, profile: Profile) -> Bytes:
    """Return the same per computation, in the order of issue."""
    used = usage(plan)
    return _with_fixed(_framework_bytes(used, profile, _Time(used, profile)), plan, profile)


def _with_fixed(framework: Bytes, plan: Plan, profile: Profile) -> Bytes:
    held = framework + (plan.arena_bytes + _always(profile))
    slack = (held * profile.slack_share).astype(np.int64)
    return held + np.maximum(slack, profile.slack_bytes)


def host_bytes(options: tuple[OptionName, ...], places: tuple[UpdatePlace, ...], profile: Profile) -> int:
    """Return the bytes of RAM that hold weights, optimizer states, gradients and activations.

    States that stay on the device have a host copy as well: it is needed when they make room for a validation.
    """
    total = sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    total += sum(tensor.bytes for tensor, place in zip(profile.tensors, places, strict=True) if place == "host")
    for block, option in zip(profile.blocks, options, strict=True):
        total += block.option(option).offload_bytes if block.has_backward else 0
    return total


class _Time:
    """The moments of an iteration: its computations in the order of issue."""

    def __init__(self, used: Usage, profile: Profile) -> None:
        self.moments: list[Computation] = computations(used.options, used.reruns, profile)
        steps = 2 * len(profile.blocks)
        self.first: list[int] = [0] * steps
        """By step: its first computation."""
        self.last: list[int] = [0] * steps
        """By step: its forward or backward; those that run again stand before it."""
        self.again: dict[int, list[int]] = {}
        """By block: when it runs again."""
        for at, moment in enumerate(self.moments):
            self.last[moment.step] = at
            if moment.save is not None:
                self.again.setdefault(moment.block, []).append(at)
        self.first[1:] = [at + 1 for at in self.last[:-1]]

    def __len__(self) -> int:
        return len(self.moments)

    def per_step(self, sizes: Bytes) -> Bytes:
        """Return the largest of ``sizes`` in each step."""
        return sizes if len(self.first) == len(sizes) else np.maximum.reduceat(sizes, self.first)


def _framework_bytes(used: Usage, profile: Profile, time: _Time) -> Bytes:
    return _activation_bytes(used, profile, time) + _gradient_bytes(used, profile, time)


def _activation_bytes(used: Usage, profile: Profile, time: _Time) -> Bytes:
    steps = 2 * len(profile.blocks)
    total = np.zeros(len(time), dtype=np.int64)
    for index, block in enumerate(profile.blocks):
        option = block.option(used.options[index])
        forward, backward = time.last[index], time.last[steps - 1 - index]
        total[forward] += block.input_bytes + block.output_bytes + option.forward_peak_bytes
        again = time.again.get(index, ())
        if again:
            _run_again(total, used, profile, time, index)
        if not block.has_backward:
            continue
        # What the first forward has saved is replaced when the block runs again.
        total[forward : (again[0] if again else backward) + 1] += option.saved_bytes
        until = again[0] + 1 if again else backward
        if option.keeps_input:
            total[forward + 1 : until] += block.input_bytes
        # the input, its gradient, and the gradient of the output
        total[backward] += (
            2 * block.input_bytes + block.output_bytes + time.moments[backward].option.backward_peak_bytes
        )
        # the gradient of the output waits while others run again
        total[time.first[steps - 1 - index] : backward] += block.output_bytes
        if index in used.left:
            total[forward + 1 : time.last[used.left[index]] + 1] += option.offload_bytes
        if index in used.fetched:
            total[time.first[used.fetched[index]] : until] += option.offload_bytes
    return total


def _run_again(total: Bytes, used: Usage, profile: Profile, time: _Time, index: int) -> None:
    """Add what the forwards of block ``index`` that run again need, and what they leave."""
    block, backward = profile.blocks[index], time.last[2 * len(profile.blocks) - 1 - index]
    saved = SAVED[used.options[index]] if block.has_backward else "nothing"
    again: Sequence[int] = time.again[index]
    for at, following in zip(again, [*again[1:], None], strict=True):
        option, save = time.moments[at].option, time.moments[at].save
        assert save is not None
        # Without a saved input it takes the output of the block before, which ran right before it.
        needed = block.input_bytes if saved == "nothing" else 0
        total[at] += needed + block.output_bytes + option.forward_peak_bytes
        if save != "nothing":
            total[at : (backward if following is None else following) + 1] += option.saved_bytes
            if option.keeps_input:
                total[at + 1 : backward if following is None else following + 1] += block.input_bytes
        saved = save


def _gradient_bytes(used: Usage, profile: Profile, time: _Time) -> Bytes:
    """Gradients held (for the host, or until the last use of a tied tensor), and those that pass by in a backward."""
    held, large, small = np.zeros((3, len(time)), dtype=np.int64)
    for index, (tensor, place) in enumerate(zip(profile.tensors, used.places, strict=True)):
        uses = backward_steps(tensor.blocks, profile) if tensor.trainable else []
        if not uses:
            continue
        first, last = time.last[uses[0]], time.last[uses[-1]]
        if len(uses) > 1:
            held[first : last + 1] += tensor.bytes
        waits = place == "host" and index not in used.grad_direct
        if waits:
            begin = last + 1 if len(uses) > 1 else last
            held[begin : time.last[used.grad_until.get(index, uses[-1])] + 1] += tensor.bytes
        ratio = 0.0 if place == "host" else profile.optimizer.scratch_ratio
        for step in uses:
            passing = _passing_bytes(tensor, ratio, waits=waits, first=step == uses[0], last=step == uses[-1])
            at = time.last[step]
            if tensor.bytes < COLLECTED_BELOW:
                small[at] += passing
            else:
                large[at] = max(large[at], passing)
    total: Bytes = held + small + large
    return total


def _passing_bytes(tensor: TensorProfile, scratch_ratio: float, *, waits: bool, first: bool, last: bool) -> int:
    """Bytes that one backward takes for the tensor's gradient, beyond what is held over steps."""
    tied = not (first and last)
    new = tensor.bytes if (tied and not first) or (not tied and not waits) else 0
    scratch = int(tensor.bytes * scratch_ratio) if last else 0
    # The second gradient of a tied tensor is added to the first and gone before the update begins.
    return max(new, scratch) if tied else new + scratch
