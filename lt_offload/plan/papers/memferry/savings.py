"""Savings of MemFerry against what it would do in enough memory, each at a price in seconds per byte.

A block's activations are computed again or copied; a weight that was copied for the forward leaves and returns before
its backward, or is read directly there; a frozen one begins to travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lt_offload.plan.iteration.computations import computations
from lt_offload.plan.iteration.decisions import uses
from lt_offload.plan.papers.memferry.chain import Reading
from lt_offload.plan.planners.ladder import ladder
from lt_offload.plan.planners.request import Allowed
from lt_offload.plan.planners.tables import embedding_steps
from lt_offload.schema.profile import OptionName, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """One way to have activations and weights: options per block, readings per tensor."""

    options: tuple[OptionName, ...]
    readings: tuple[Reading, ...]
    zero_copy: bool = True
    """True if more may be read directly than is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Something that frees memory for time."""

    price: float
    """Seconds per byte."""
    block: int
    """The block whose option it changes, or that uses the tensor first: early blocks hold their memory longest."""
    option: OptionName | None = None
    tensor: int = -1
    reading: Reading = Reading()


def with_savings(start: Given, chosen: Sequence[Saving]) -> Given:
    """Return ``start`` with the ``chosen`` savings made, one after the other."""
    options, readings = list(start.options), list(start.readings)
    for saving in chosen:
        if saving.option is not None:
            options[saving.block] = saving.option
        else:
            readings[saving.tensor] = saving.reading
    return replace(start, options=tuple(options), readings=tuple(readings))


def savings(profile: Profile, start: Given, allowed: Allowed, *, link_price: float) -> list[Saving]:
    """Return what can be given up, the cheapest first.

    Args:
        profile: the model.
        start: what is had in enough memory, with the fastest of the ``allowed`` options.
        allowed: what activations may become.
        link_price: what a second of copying costs: 1 if the computations wait for it, less if it hides.
    """
    rungs = ladder(profile, allowed, link_price=link_price).rungs
    offers = [Saving(price=rung.price, block=rung.block, option=rung.option) for rung in rungs]
    offers += _of_tensors(profile, start, link_price)
    return sorted(offers, key=lambda saving: (saving.price, saving.block, saving.tensor))


def _of_tensors(profile: Profile, start: Given, link_price: float) -> Iterator[Saving]:
    rate, computed = profile.hardware.h2d_bytes_per_s, computations(start.options, {}, profile)
    for index, (tensor, reading) in enumerate(zip(profile.tensors, start.readings, strict=True)):
        if reading.leaves or (reading.zero_copy and len(tensor.blocks) == 1) or tensor.bytes == 0:
            continue
        # One that is always there is copied for the forward and the backward then, any other once more than before.
        copy_price, copies = link_price * tensor.bytes / rate, 2 if reading.always else 1
        ways = [(copies * copy_price, replace(reading, leaves=True, always=False))]
        if start.zero_copy and tensor.zero_copy is not None:
            tied = len(tensor.blocks) > 1
            steps = embedding_steps(profile, tensor) if tied else tuple(uses(tensor.blocks, profile))
            reads = [computed[step].zero_copy([index], profile) for step in steps]
            prices = [longer + link_price * nbytes / rate for nbytes, longer in reads]
            if not tied:
                ways.append((sum(prices), Reading(zero_copy=steps)))
                if not reading.always and len(steps) > 1:
                    # In the backward alone: the copy for the forward stays as it is, and may go after it.
                    ways.append((prices[-1], Reading(zero_copy=steps[-1:])))
            elif steps and not reading.zero_copy:  # the other uses share a copy
                ways.append((sum(prices) + (copies - 1) * copy_price, Reading(zero_copy=steps)))
        cost, cheapest = min(ways, key=lambda way: way[0])
        yield Saving(price=cost / tensor.bytes, block=tensor.blocks[0], tensor=index, reading=cheapest)
