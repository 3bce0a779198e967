"""What MemFerry's plans give up, and in which order, when they do not fit: device copies and kept activations.

A weight that was copied for the forward leaves and returns before its backward, or is read directly there; a frozen one
begins to travel; a block's activations are computed again or copied. Prices are seconds per byte. Knows no budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lt_offload.plan.iteration.computations import computations
from lt_offload.plan.iteration.decisions import uses
from lt_offload.plan.planners.memferry.chain import Reading
from lt_offload.plan.planners.memferry.embeddings import embedding_steps
from lt_offload.plan.planners.request import Allowed, cheapest_swap
from lt_offload.schema.profile import HardwareProfile, OptionName, OptionProfile, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """One way to have activations and weights: options per block, readings per tensor."""

    options: tuple[OptionName, ...]
    readings: tuple[Reading, ...]
    zero_copy: bool = True
    """Whether more may be read directly than is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaxation:
    """Something that frees memory for time."""

    price: float
    """Seconds per byte."""
    block: int
    """Which option it changes, or where the tensor is used first: early blocks hold their memory longest."""
    option: OptionName | None = None
    tensor: int = -1
    reading: Reading = Reading()


def relaxed(given: Given, steps: Sequence[Relaxation]) -> Given:
    """Return ``given`` after ``steps``."""
    options, readings = list(given.options), list(given.readings)
    for step in steps:
        if step.option is not None:
            options[step.block] = step.option
        else:
            readings[step.tensor] = step.reading
    return replace(given, options=tuple(options), readings=tuple(readings))


def relaxations(
    profile: Profile, given: Given, allowed: Allowed, *, link_price: float, copying: bool
) -> list[Relaxation]:
    """Return what can be given up, the cheapest first.

    Args:
        profile: the model.
        given: where to begin.
        allowed: the options that may be chosen.
        link_price: what a second of copying weights costs: 1 if the computations wait for it, less if it hides.
        copying: whether options that copy activations may be chosen.
    """
    found = [*_of_blocks(profile, given, allowed, copying), *_of_tensors(profile, given, link_price)]
    return sorted(found, key=lambda step: (step.price, step.block, step.tensor))


def seconds(option: OptionProfile, hardware: HardwareProfile) -> float:
    """Return what a block takes with ``option``, and what its copies take longer than the block itself."""
    out = option.offload_bytes / hardware.d2h_bytes_per_s - option.forward_s
    back = option.offload_bytes / hardware.h2d_bytes_per_s - option.backward_s
    return option.forward_s + option.backward_s + max(out, 0.0) + max(back, 0.0)


def _of_blocks(profile: Profile, given: Given, allowed: Allowed, copying: bool) -> Iterator[Relaxation]:
    """Yield, for each block, ever smaller options at ever higher prices."""
    hardware = profile.hardware
    for at, (block, options) in enumerate(zip(profile.blocks, allowed, strict=True)):
        now, price = block.option(given.options[at]), 0.0
        usable = [o for o in options if o.name != "discard" and (copying or not o.offload_bytes)]
        while swap := cheapest_swap(block, now, usable, partial(seconds, hardware=hardware)):
            cheapest, now = swap
            # Later ones may be cheaper per byte, but come after those before them.
            price = max(price, cheapest)
            yield Relaxation(price=price, block=at, option=now.name)


def _of_tensors(profile: Profile, given: Given, link_price: float) -> Iterator[Relaxation]:
    rate, computed = profile.hardware.h2d_bytes_per_s, computations(given.options, {}, profile)
    for index, (tensor, reading) in enumerate(zip(profile.tensors, given.readings, strict=True)):
        if reading.leaves or (reading.zero_copy and len(tensor.blocks) == 1) or tensor.bytes == 0:
            continue
        copy_price, copies = link_price * tensor.bytes / rate, 2 if reading.always else 1
        ways = [(copies * copy_price, replace(reading, leaves=True, always=False))]
        if given.zero_copy and tensor.zero_copy is not None:
            tied = len(tensor.blocks) > 1
            steps = embedding_steps(profile, tensor) if tied else tuple(uses(tensor.blocks, profile))
            reads = [computed[step].zero_copy([index], profile) for step in steps]
            prices = [longer + link_price * nbytes / rate for nbytes, longer in reads]
            if not tied:
                ways.append((sum(prices), Reading(zero_copy=steps)))
                if not reading.always and len(steps) > 1:
                    ways.append((prices[-1], Reading(zero_copy=steps[-1:])))
            elif steps and not reading.zero_copy:  # the other uses share a copy
                ways.append((sum(prices) + (copies - 1) * copy_price, Reading(zero_copy=steps)))
        cost, cheapest = min(ways, key=lambda way: way[0])
        yield Relaxation(price=cost / tensor.bytes, block=tensor.blocks[0], tensor=index, reading=cheapest)
