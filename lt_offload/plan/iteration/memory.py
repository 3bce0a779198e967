"""Bytes that a plan takes on the device, computation by computation, and on the host. Decides nothing.

The device holds the arena (constant), what is there before the first tensor, and what the framework allocates:
activations, workspaces and gradients. Everything is counted in the order of issue, because that is the order in which
memory is taken and given back, whenever the device gets round to it. A step without forwards that run again is one
computation; otherwise its computations follow each other with different things alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.iteration.computations import SAVED, Computation, Recomputation, computations
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.accesses import writes
from lt_offload.schema.plan import ALIGNMENT, Plan, UpdatePlace
from lt_offload.schema.profile import COLLECTED_BELOW, GATHERED_BELOW, OptionName, Profile

Bytes = NDArray[np.int64]
STATE_PADDING = 32
"""Each state tensor of a parameter begins at a multiple of 8 bytes; room for four of them to be rounded up."""


def aligned(nbytes: int) -> int:
    """Return the bytes of the arena that a buffer of ``nbytes`` takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def state_room(nbytes: int) -> int:
    """Return the bytes of the arena that ``nbytes`` of optimizer states take."""
    return aligned(nbytes + STATE_PADDING) if nbytes else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The parts of a plan that decide about the framework's memory."""

    options: tuple[OptionName, ...]
    places: tuple[UpdatePlace, ...]
    grad_release_after: dict[int, int] = field(default_factory=dict)
    """Per tensor that the host updates: the step at whose end its gradient has left."""
    by_rows: set[int] = field(default_factory=set)
    """Tables among these whose first block's gradient leaves as rows, after the last block's has left."""
    grad_zero_copy: set[int] = field(default_factory=set)
    """Tensors whose gradients the backward writes to host memory itself."""
    left: dict[int, int] = field(default_factory=dict)
    """Per block with offloaded activations: the step at whose end they have left."""
    fetched: dict[int, int] = field(default_factory=dict)
    """And the step in which they take device memory again."""
    recomputations: Mapping[int, tuple[Recomputation, ...]] = field(default_factory=dict)
    """By backward step: the forwards that run again before its backward, in order."""


def usage(plan: Plan) -> Usage:
    """Return the parts of ``plan`` that decide about the framework's memory."""
    again = recomputations(plan)
    used = Usage(options=plan.options, places=plan.update_places, recomputations=again)
    for op in plan.ops:
        if op.writes_gradients:
            used.grad_zero_copy.update(plan.tensors(op))
        elif op.sends_gradients and op.rows == "looked up":
            used.by_rows.update(plan.tensors(op))
        elif op.sends_gradients and op.release_after is not None:
            used.grad_release_after.update(dict.fromkeys(plan.tensors(op), op.release_after))
        elif op.payload == "activation":
            if "activation" in writes(op, "device"):
                used.fetched[op.block] = op.step
            elif op.release_after is not None:
                used.left[op.block] = op.release_after
    return used


def recomputations(plan: Plan) -> dict[int, tuple[Recomputation, ...]]:
    """Return, by step, the forwards that ``plan`` runs again."""
    forwards: dict[int, tuple[Recomputation, ...]] = {}
    for op in plan.ops:
        if op.save is not None:
            forwards[op.step] = (*forwards.get(op.step, ()), Recomputation(block=op.block, save=op.save))
    return forwards


def backward_steps(blocks: tuple[int, ...], profile: Profile) -> list[int]:
    """Return the steps in which the backward of ``blocks`` does something, ascending."""
    positions = timeline(profile)
    if len(blocks) == 1:  # nearly all tensors
        return [positions.backward(blocks[0])] if profile.blocks[blocks[0]].has_backward else []
    return sorted(positions.backward(block) for block in blocks if profile.blocks[block].has_backward)


def framework_bytes(used: Usage, profile: Profile) -> Bytes:
    """Return, per step, the most bytes that the framework's allocator holds."""
    time = _Time(used, profile)
    return time.per_step(_framework_bytes(used, profile, time))


def room_within(budget: int, profile: Profile) -> int:
    """Return the device bytes of ``budget`` that a plan decides about."""
    used = min(budget - profile.slack_bytes, int(budget / (1 + profile.slack_share)) + 1)
    # The quotient is at or just above the answer, as the slack is rounded down; exactness matters at the smallest
    # budgets.
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
    """Return the device bytes that no plan changes: context, page tables, tensors that all blocks share."""
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


def host_bytes(plan: Plan, profile: Profile) -> int:
    """Return the bytes of RAM that the process takes: with weights, states, gradients, their sums and activations.

    Sums that stay on the device have a host copy, too, as states have.
    """
    written = usage(plan).grad_zero_copy
    sums = {t for group in plan.groups if group.payload == "sum" for t in group.tensors}
    added = sum(profile.tensors[t].bytes for t in sums)
    return lasting_host_bytes(plan.options, written, profile, plan.update_places) + plan.gradient_bytes + added


def least_host_bytes(
    options: tuple[OptionName, ...], places: tuple[UpdatePlace, ...], written: Iterable[int], profile: Profile
) -> int:
    """Return the bytes of RAM below which no plan with these decisions exists; with them, one does.

    Gradients share memory, if need be so that each copy waits for the updates of the step before: only those of one
    step, which leave together, have to be there at the same time.
    """
    written, together = set(written), defaultdict[int, int](int)
    for index, (tensor, place) in enumerate(zip(profile.tensors, places, strict=True)):
        if place == "host" and index not in written:
            together[backward_steps(tensor.blocks, profile)[-1]] += aligned(tensor.bytes)
    return lasting_host_bytes(options, written, profile, places) + max(together.values(), default=0)


def lasting_host_bytes(
    options: tuple[OptionName, ...],
    written: Iterable[int],
    profile: Profile,
    places: tuple[UpdatePlace, ...] | None = None,
) -> int:
    """Return the bytes of RAM for all but gradients that are copied; ``written`` are those that the backward writes.

    States that stay on the device have a host copy as well: it is needed when they make room for a validation. What
    several processes have in common counts for each by its part; without ``places`` as if the host updated all.
    """
    total = profile.hardware.process_bytes
    in_common = 0
    for index, tensor in enumerate(profile.tensors):
        nbytes, own = tensor.bytes + tensor.state_bytes, tensor.sum_bytes
        on_host = profile.common_updates and (places is None or places[index] == "host")
        if tensor.trainable and not on_host:
            own = nbytes
        total += own
        in_common += nbytes - own
    total += -(-in_common // profile.processes)
    total += sum(profile.tensors[index].bytes for index in written)
    for block, option in zip(profile.blocks, options, strict=True):
        total += block.option(option).offload_bytes if block.has_backward else 0
    return total


class _Time:
    """The moments of an iteration: its computations in the order of issue."""

    def __init__(self, used: Usage, profile: Profile) -> None:
        self.moments: list[Computation] = computations(used.options, used.recomputations, profile)
        self.steps = timeline(profile)
        self.first: list[int] = [0] * len(self.steps)
        """By step: its first computation."""
        self.last: list[int] = [0] * len(self.steps)
        """By step: its forward or backward; those that run again stand before it."""
        self.again: dict[int, list[int]] = {}
        """By block: its forwards that run again."""
        for at, moment in enumerate(self.moments):
            self.last[moment.step] = at
            if moment.save is not None:
                self.again.setdefault(moment.block, []).append(at)
        self.first[1:] = [at + 1 for at in self.last[:-1]]

    def __len__(self) -> int:
        return len(self.moments)

    def per_step(self, sizes: Bytes) -> Bytes:
        # Without forwards that run again, steps and computations are the same.
        return sizes if len(self.first) == len(sizes) else np.maximum.reduceat(sizes, self.first)


def _framework_bytes(used: Usage, profile: Profile, time: _Time) -> Bytes:
    """Return, per computation, the bytes held before it plus the most that it adds: in its middle, or at its end."""
    grads = _gradients(used, profile, time)
    total = _activation_bytes(used, profile, time) + grads.earlier
    for block in range(len(profile.blocks)):
        if not profile.blocks[block].has_backward:
            continue
        at = time.last[time.steps.backward(block)]
        option = time.moments[at].option
        working = option.backward_peak_bytes + grads.new[at] + grads.passing[at]
        if option.held_peak_bytes is not None:
            working = min(working, option.held_peak_bytes + grads.scratch[at])
        if option.passing_peak_bytes is not None:
            working = min(working, option.passing_peak_bytes + grads.new[at] - grads.written[at] + grads.scratch[at])
        gone = option.saved_bytes if block < len(profile.blocks) - 1 else 0  # the last one's may belong to the loss
        total[at] += max(working, grads.new[at] - grads.written[at] + grads.ending[at] - gone)
    return total


def _activation_bytes(used: Usage, profile: Profile, time: _Time) -> Bytes:
    total = np.zeros(len(time), dtype=np.int64)
    for index, block in enumerate(profile.blocks):
        option = block.option(used.options[index])
        forward, backward = time.last[time.steps.forward(index)], time.last[time.steps.backward(index)]
        # Input and output are there whatever the option keeps of them afterwards.
        total[forward] += block.input_bytes + block.output_bytes + option.forward_peak_bytes
        again = time.again.get(index, ())
        if again:
            _run_again(total, used, profile, time, index)
        if not block.has_backward:
            continue
        # What the first forward has saved is replaced when the block runs again.
        total[forward : (again[0] if again else backward) + 1] += option.saved_bytes
        release_after = again[0] + 1 if again else backward
        if option.keeps_input:
            total[forward + 1 : release_after] += block.input_bytes
        # the input, its gradient, and the gradient of the output
        total[backward] += 2 * block.input_bytes + block.output_bytes
        # the gradient of the output waits while others run again
        total[time.first[time.steps.backward(index)] : backward] += block.output_bytes
        if index in used.left:
            total[forward + 1 : time.last[used.left[index]] + 1] += option.offload_bytes
        if index in used.fetched:
            total[time.first[used.fetched[index]] : release_after] += option.offload_bytes
    return total - _gone_before_the_loss(used, profile, time)


def _gone_before_the_loss(used: Usage, profile: Profile, time: _Time) -> Bytes:
    """Return the bytes that copies of activations give back between the last block's forward and the loss."""
    gone = np.zeros(len(time), dtype=np.int64)
    last = len(profile.blocks) - 1
    step, option = time.steps.forward(last), profile.blocks[last].option(used.options[last])
    if option.before_loss_bytes is not None:
        left = (index for index, at in used.left.items() if at == step and index != last)
        leaving = sum(profile.blocks[index].option(used.options[index]).offload_bytes for index in left)
        gone[time.last[step]] = min(leaving, option.forward_peak_bytes - option.before_loss_bytes)
    return gone


def _run_again(total: Bytes, used: Usage, profile: Profile, time: _Time, index: int) -> None:
    """Add the bytes that forwards of block ``index`` which run again need, and the bytes that they leave."""
    block, backward = profile.blocks[index], time.last[time.steps.backward(index)]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _GradientBytes:
    """Bytes of gradients, and of the scratch memory of their use, by computation."""

    earlier: Bytes
    """Gradients of computations before, still held at its end."""
    new: Bytes
    """Gradients that come in a backward and stay to its end."""
    written: Bytes
    """Bytes of ``new`` that do not stay, as each gradient is written to the host as soon as it is complete."""
    passing: Bytes
    """The most bytes of gradients that come in the middle of a backward and go at once, with scratch memory."""
    scratch: Bytes
    """Bytes of ``passing`` that are not gradients."""
    ending: Bytes
    """Bytes that are made when the activations of a backward have gone, and all its gradients have come."""


def _gradients(used: Usage, profile: Profile, time: _Time) -> _GradientBytes:
    earlier, new, passing, scratch, updating, leaving, gone = np.zeros((7, len(time)), dtype=np.int64)
    small: dict[tuple[int, str], list[int]] = {}
    """Gradients for the host that are gathered with others, by computation and dtype."""
    for index, (tensor, place) in enumerate(zip(profile.tensors, used.places, strict=True)):
        uses = [time.last[step] for step in backward_steps(tensor.blocks, profile)] if tensor.trainable else []
        if not uses:
            continue
        first, last, size = uses[0], uses[-1], tensor.bytes
        if index in used.by_rows:
            new[first] += size
            earlier[first + 1 : time.last[used.grad_release_after[index]] + 1] += size
            new[last] += size + tensor.lookup_bytes  # of all rows, until those of the batch have been taken out of it
            continue
        tied, written = len(uses) > 1, index in used.grad_zero_copy
        waits = place == "host" and not written
        ends = time.last[used.grad_release_after[index]] if waits and index in used.grad_release_after else last
        # A large one that is used or written at once never lies beside others and counts as passing below. Measured
        # peaks are without small ones, whatever becomes of them.
        at_once = not waits and size >= COLLECTED_BELOW
        if tied or not at_once:
            new[first] += size
        if written and not tied and not at_once:
            gone[first] += size
        if tied or waits:
            earlier[first + 1 : ends + 1] += size
        for at in uses[1:]:
            passing[at] = max(passing[at], size)  # until it has been added to the first one
        if waits:
            if size < GATHERED_BELOW:
                small.setdefault((last, tensor.dtype), []).append(size)
            continue
        # The backward has written it to the host, where the update needs nothing of the device.
        beside = 0 if place == "host" else profile.scratch(index)
        if not at_once:
            updating[last] += beside
            continue
        passing[last] = max(passing[last], beside + (0 if tied else size))
        scratch[last] = max(scratch[last], beside)
    for (at, _), sizes in small.items():
        # Gathering makes a second copy of them; one alone leaves as it is.
        leaving[at] += sum(sizes) if len(sizes) > 1 else 0
    # A large gradient is used at once, and those that were collected so far with it.
    early = np.where(passing > 0, updating, 0)
    return _GradientBytes(
        earlier=earlier,
        new=new,
        written=gone,
        passing=passing + early,
        scratch=scratch + early,
        ending=np.maximum(updating, leaving),
    )
