"""From a profile to MemFerry's chain of layers, and from what is chosen there to the decisions of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lt_offload.plan.iteration.computations import Computation, computations
from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision, stays_between, uses
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.papers.memferry.model import MemFerryLayer, MemFerryWeight
from lt_offload.schema.profile import OptionName, Profile, TensorProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The way in which computations get at one tensor."""

    zero_copy: tuple[int, ...] = ()
    """The steps that read it in host memory."""
    leaves: bool = False
    """True if its device copy goes and comes again between the other steps that use it."""
    always: bool = False
    """True if it is on the device all the time; for frozen tensors."""


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
    # Direct reads of tied tensors are no choice of the chain: they are part of how long its layers take.
    seconds = _seconds(profile, computed, tied)
    for index, (tensor, reading) in enumerate(_zip(profile, readings)):
        if not tensor.trainable:
            continue
        block = next((block for block in tensor.blocks if block not in reading.zero_copy), tensor.blocks[0])
        weights[block].append(_weight(profile, index, computed))
        tensors[block].append(index)
    layers = tuple(
        MemFerryLayer(forward_s=seconds[at], backward_s=seconds[-1 - at], weights=tuple(of_block))
        for at, of_block in enumerate(weights)
    )
    return ProfileChain(layers=layers, tensors=tuple(tuple(of_block) for of_block in tensors))


def _weight(profile: Profile, index: int, computed: Sequence[Computation]) -> MemFerryWeight:
    tensor, hardware = profile.tensors[index], profile.hardware
    costs = MemFerryWeight(
        transfer_s=tensor.bytes / hardware.h2d_bytes_per_s,
        forward_s=float("inf"),
        gradient_bytes=tensor.bytes,
        gradient_s=tensor.zero_copy.grad_s if tensor.zero_copy else float("inf"),
    )
    # Without figures, or with uses in several layers, of which the chain's weight has one: it is copied.
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


def _seconds(profile: Profile, computed: Sequence[Computation], readings: Sequence[Reading]) -> list[float]:
    seconds = [computation.seconds for computation in computed]
    for index, (_, reading) in enumerate(_zip(profile, readings)):
        for step in reading.zero_copy:
            seconds[step] += computed[step].zero_copy([index], profile)[1]
    return seconds


def to_decisions(
    profile: Profile, options: tuple[OptionName, ...], readings: Sequence[Reading], *, written: Collection[int]
) -> Decisions:
    """Return the decisions with these options, readings and gradients ``written`` to host memory by the backward."""
    tensors = []
    for index, (tensor, reading) in enumerate(_zip(profile, readings)):
        tensors.append(
            TensorDecision(
                place="host" if tensor.trainable else "none",
                stays=_stays(profile, tensor, reading),
                zero_copy=reading.zero_copy,
                grad_zero_copy=index in written,
            )
        )
    return Decisions(tensors=tuple(tensors), options=options)


def _stays(profile: Profile, tensor: TensorProfile, reading: Reading) -> tuple[Interval, ...]:
    """Return the stays that cover the uses with a device copy; what travels leaves after the backward in any case."""
    copied = [step for step in uses(tensor.blocks, profile) if step not in reading.zero_copy]
    if reading.always or not copied:
        return ()
    steps = len(timeline(profile))
    # Without a step between them there is nothing to be gained by leaving.
    gaps = [(last, step) for last, step in pairwise(copied) if reading.leaves and step - last > 1]
    return stays_between([(copied[-1], copied[0] + steps), *gaps], steps)


def _zip(profile: Profile, readings: Sequence[Reading]) -> Iterator[tuple[TensorProfile, Reading]]:
    return zip(profile.tensors, readings, strict=True)
