"""From a profile to MemFerry's chain of layers, and from what is chosen there to the decisions of a plan.

Copies begin as if no computation ever waited, whatever memory they take: fitting them into it comes afterwards.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lt_offload.plan.iteration.computations import Computation, computations
from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision, block_decisions, uses
from lt_offload.plan.iteration.memory import backward_steps
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.memferry.model import MemFerryLayer, MemFerryWeight
from lt_offload.schema.profile import OptionName, Profile, TensorProfile

_LAG, _LEAD = 1, 1
"""Steps that offloaded activations leave late and return early."""
_SLACK = 1
"""Steps by which copies begin before they have to, if nothing ever waited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the computations get at one tensor."""

    zero_copy: tuple[int, ...] = ()
    """The steps that read it in host memory."""
    leaves: bool = False
    """Whether its device copy goes and comes again between the other steps that use it."""
    always: bool = False
    """Whether it is on the device all the time; for frozen tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileChain:
    """The layers of a profile; those tensors that travel are their weights."""

    layers: tuple[MemFerryLayer, ...]
    tensors: tuple[tuple[int, ...], ...]
    """Per layer: its weights' indices in the profile."""


def chain(profile: Profile, options: Sequence[OptionName], readings: Sequence[Reading]) -> ProfileChain:
    """Return the chain whose weights are the trainable tensors; the frozen ones add what ``readings`` say.

    A tied tensor is a weight of the first block that does not read it directly, and has to be copied there.
    """
    weights: list[list[MemFerryWeight]] = [[] for _ in profile.blocks]
    tensors: list[list[int]] = [[] for _ in profile.blocks]
    computed = computations(options, {}, profile)
    tied = [reading if len(tensor.blocks) > 1 else Reading() for tensor, reading in _zip(profile, readings)]
    seconds = _seconds(profile, computed, tied)
    for index, (tensor, reading) in enumerate(_zip(profile, readings)):
        if not tensor.trainable:
            continue
        block = next((block for block in tensor.blocks if block not in reading.zero_copy), tensor.blocks[0])
        weights[block].append(_weight(profile, index, computed))
        tensors[block].append(index)
    layers = tuple(
        MemFerryLayer(forward_s=seconds[at], backward_s=seconds[-1 - at], weights=tuple(found))
        for at, found in enumerate(weights)
    )
    return ProfileChain(layers=layers, tensors=tuple(tuple(found) for found in tensors))


def _weight(profile: Profile, index: int, computed: Sequence[Computation]) -> MemFerryWeight:
    tensor, hardware = profile.tensors[index], profile.hardware
    costs = MemFerryWeight(
        transfer_s=tensor.bytes / hardware.h2d_bytes_per_s,
        forward_s=float("inf"),
        gradient_bytes=tensor.bytes,
        gradient_transfer_s=tensor.bytes / hardware.d2h_bytes_per_s,
        gradient_s=tensor.zero_copy.grad_s if tensor.zero_copy else float("inf"),
    )
    if tensor.zero_copy is None or len(tensor.blocks) > 1:
        return costs
    forward_bytes, forward_s = computed[tensor.blocks[0]].zero_copy([index], profile)
    backward_bytes, backward_s = computed[-1 - tensor.blocks[0]].zero_copy([index], profile)
    return replace(
        costs,
        forward_s=forward_s,
        backward_s=backward_s,
        forward_read_s=forward_bytes / hardware.h2d_bytes_per_s,
        backward_read_s=backward_bytes / hardware.h2d_bytes_per_s,
    )


def _seconds(
    profile: Profile, computed: Sequence[Computation], readings: Sequence[Reading], written: Collection[int] = ()
) -> list[float]:
    """Return, per step, how long its computation takes: the option's, and what ``readings`` and ``written`` add."""
    found = [computation.seconds for computation in computed]
    for index, (tensor, reading) in enumerate(_zip(profile, readings)):
        for step in reading.zero_copy:
            found[step] += computed[step].zero_copy([index], profile)[1]
        if index in written and tensor.zero_copy is not None:
            found[backward_steps(tensor.blocks, profile)[-1]] += tensor.zero_copy.grad_s
    return found


def to_decisions(
    profile: Profile,
    options: tuple[OptionName, ...],
    readings: Sequence[Reading],
    *,
    written: Collection[int],
    early: bool,
) -> Decisions:
    """Return the decisions with these options, readings and gradients ``written`` to host memory by the backward.

    Args:
        profile: the model.
        options: one per block.
        readings: one per tensor.
        written: the tensors whose gradients are not kept on the device.
        early: whether copies for the next forward may begin in the backward, as soon as the host has updated; else
            the iteration begins with them, as in the paper.
    """
    schedule = _ChainSchedule(profile, options, readings, written, early)
    tensors = []
    for index, (tensor, reading) in enumerate(_zip(profile, readings)):
        intervals = () if reading.always else schedule.intervals[index]
        if not tensor.trainable:
            tensors.append(TensorDecision(place="none", intervals=intervals, zero_copy=reading.zero_copy))
            continue
        decision = TensorDecision(
            place="host",
            intervals=intervals,
            zero_copy=reading.zero_copy,
            grad_release_after=None if index in written else schedule.left[index],
            grad_zero_copy=index in written,
        )
        tensors.append(decision)
    return Decisions(tensors=tuple(tensors), blocks=block_decisions(profile, options, lag=_LAG, lead=_LEAD))


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChainCopy:
    """Something that takes the link to the device: for a tensor, or for nobody that would have to be told."""

    need: int
    """The step that waits for it, counted from the start of one iteration into the next."""
    seconds: float
    earliest: int
    """The first step in which it may be issued."""
    tensor: int | None = None
    end: int = 0
    """The step at whose end the copy is dropped."""


class _ChainSchedule:
    """When device copies come, and when gradients have left."""

    def __init__(
        self,
        profile: Profile,
        options: tuple[OptionName, ...],
        readings: Sequence[Reading],
        written: Collection[int],
        early: bool,
    ) -> None:
        self.profile, self.options, self.readings = profile, options, readings
        self.steps = len(timeline(profile))
        self.computed = computations(options, {}, profile)
        self.ends = list(accumulate(2 * _seconds(profile, self.computed, readings, written)))
        self.left: dict[int, int] = {}
        """By tensor whose gradient is copied: the step at whose end it has left."""
        ready = self._updates(written)
        if not early:
            ready = dict.fromkeys(ready, self.steps)
        copies = [copy for index in range(len(profile.tensors)) for copy in self._weight_copies(index, ready)]
        self.intervals = self._just_in_time([*copies, *self._other_copies()])

    def _updates(self, written: Collection[int]) -> dict[int, int]:
        """Return, by tensor, the step in which the host has updated it; on the way, when gradients have left."""
        ready: dict[int, int] = {}
        out = host = 0.0
        complete = {
            i: backward_steps(t.blocks, self.profile)[-1] for i, t in enumerate(self.profile.tensors) if t.trainable
        }
        for index, step in sorted(complete.items(), key=lambda item: item[1]):
            nbytes = self.profile.tensors[index].bytes
            arrived = self.ends[step]
            if index not in written:
                out = arrived = max(out, arrived) + nbytes / self.profile.hardware.d2h_bytes_per_s
                self.left[index] = min(self._step_at(out), self.steps - 1)
            host = max(host, arrived) + nbytes / self.profile.optimizer.host_bytes_per_s
            ready[index] = max(self._step_at(host), step + 1)
        return ready

    def _weight_copies(self, index: int, ready: dict[int, int]) -> Iterator[_ChainCopy]:
        tensor, reading = self.profile.tensors[index], self.readings[index]
        copied = [step for step in uses(tensor.blocks, self.profile) if step not in reading.zero_copy]
        if reading.always or not copied:
            return
        groups = [[copied[0]]]
        for step in copied[1:]:
            # Without a step between them there is nothing to be gained by leaving.
            if reading.leaves and step - groups[-1][-1] > _LEAD + 1:
                groups.append([step])
            else:
                groups[-1].append(step)
        seconds = tensor.bytes / self.profile.hardware.h2d_bytes_per_s
        forwards = len(self.profile.blocks)
        for at, group in enumerate(groups):
            # What it follows: the drop of the copy before, the host's update, or a forward that reads it directly.
            before = groups[at - 1][-1] + 1
            if group[0] >= forwards:
                passed = [step + 1 for step in reading.zero_copy if step < forwards]
                yield _ChainCopy(
                    need=group[0],
                    seconds=seconds,
                    earliest=max(before if at else 0, *passed, 0),
                    tensor=index,
                    end=group[-1],
                )
            else:
                earliest = before + self.steps if at else max(before, ready.get(index, 0))
                yield _ChainCopy(
                    need=group[0] + self.steps, seconds=seconds, earliest=earliest, tensor=index, end=group[-1]
                )

    def _other_copies(self) -> Iterator[_ChainCopy]:
        """Activations that return, and what is read directly."""
        rate = self.profile.hardware.h2d_bytes_per_s
        for at, (block, name) in enumerate(zip(self.profile.blocks, self.options, strict=True)):
            nbytes = block.option(name).offload_bytes if block.has_backward else 0
            if nbytes:
                yield _ChainCopy(need=self.steps - 1 - at, seconds=nbytes / rate, earliest=at + 1)
        for index, reading in enumerate(self.readings):
            for step in reading.zero_copy:
                nbytes, _ = self.computed[step].zero_copy([index], self.profile)
                need = step + self.steps if step < len(self.profile.blocks) else step
                yield _ChainCopy(need=need, seconds=nbytes / rate, earliest=0)

    def _just_in_time(self, copies: Sequence[_ChainCopy]) -> list[tuple[Interval, ...]]:
        """Return, by tensor, the intervals that begin as late as the link allows, and a little earlier."""
        intervals: list[list[Interval]] = [[] for _ in self.profile.tensors]
        free = float("inf")
        for copy in sorted(copies, key=lambda copy: -copy.need):
            begin = self.ends[copy.need - 1] if copy.need else 0.0
            free = min(free, begin) - copy.seconds
            start = min(max(self._step_at(free) - _SLACK, copy.earliest), copy.need)
            if copy.tensor is not None:
                intervals[copy.tensor].append(Interval(start=start % self.steps, end=copy.end))
        return [tuple(reversed(found)) for found in intervals]

    def _step_at(self, time: float) -> int:
        """Return the step that runs at ``time``."""
        return min(bisect.bisect_right(self.ends, time), len(self.ends) - 1)


def _zip(profile: Profile, readings: Sequence[Reading]) -> Iterator[tuple[TensorProfile, Reading]]:
    return zip(profile.tensors, readings, strict=True)
