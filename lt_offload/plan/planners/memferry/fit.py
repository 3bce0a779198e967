"""Makes what MemFerry would do in enough memory fit: gives up as little as it can, in the order that simulates best.

What can be given up, each at a price in seconds per byte: a weight that was copied for the forward leaves and returns
before its backward, or is read directly there; a frozen one begins to travel; a block's activations are computed again
or copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lt_offload.plan.assembly.copies import device_copies
from lt_offload.plan.assembly.fit import fit
from lt_offload.plan.assembly.placement import Placement, live_bytes
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.iteration.computations import computations
from lt_offload.plan.iteration.decisions import Decisions, uses
from lt_offload.plan.iteration.memory import framework_bytes
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.planners.memferry.chain import Reading, to_decisions
from lt_offload.plan.planners.memferry.embeddings import embedding_steps
from lt_offload.plan.planners.request import Allowed, Request, cheapest_swap
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.profile import HardwareProfile, OptionName, OptionProfile, Profile

_LINK_PRICES = (1.0, 0.1)
"""What a second of copying may cost: all of it if the computations wait for the link, little if they do not."""
_MOST_FITTED = 2
"""How many of the attempts that seem to fit are tried."""
Written = frozenset[int]
"""The tensors whose gradients the backward writes to host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """One way to have activations and weights: options per block, readings per tensor."""

    options: tuple[OptionName, ...]
    readings: tuple[Reading, ...]
    zero_copy: bool = True
    """Whether more may be read directly than is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Something that frees memory for time."""

    price: float
    """Seconds per byte."""
    block: int
    """Which option it changes, or where the tensor is used first: early blocks hold their memory longest."""
    option: OptionName | None = None
    tensor: int = -1
    reading: Reading = Reading()


def with_savings(given: Given, steps: Sequence[Saving]) -> Given:
    """Return ``given`` after ``steps``."""
    options, readings = list(given.options), list(given.readings)
    for step in steps:
        if step.option is not None:
            options[step.block] = step.option
        else:
            readings[step.tensor] = step.reading
    return replace(given, options=tuple(options), readings=tuple(readings))


def savings(profile: Profile, given: Given, allowed: Allowed, *, link_price: float, copying: bool) -> list[Saving]:
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


def _of_blocks(profile: Profile, given: Given, allowed: Allowed, copying: bool) -> Iterator[Saving]:
    """Yield, for each block, ever smaller options at ever higher prices."""
    hardware = profile.hardware
    for at, (block, options) in enumerate(zip(profile.blocks, allowed, strict=True)):
        now, price = block.option(given.options[at]), 0.0
        usable = [o for o in options if o.name != "discard" and (copying or not o.offload_bytes)]
        while swap := cheapest_swap(block, now, usable, partial(seconds, hardware=hardware)):
            cheapest, now = swap
            # Later ones may be cheaper per byte, but come after those before them.
            price = max(price, cheapest)
            yield Saving(price=price, block=at, option=now.name)


def _of_tensors(profile: Profile, given: Given, link_price: float) -> Iterator[Saving]:
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
        yield Saving(price=cost / tensor.bytes, block=tensor.blocks[0], tensor=index, reading=cheapest)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Manner:
    """What is the same for all steps of one ladder."""

    early: bool
    link_price: float
    written: Written


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    manner: _Manner
    decisions: Decisions
    seconds: float
    given_up: int
    """How many steps of the ladder it took."""
    least: Decisions
    """What is left after all of them."""
    least_bytes: int


class Fitting:
    """Makes decisions for one request."""

    def __init__(self, request: Request, *, copying: bool) -> None:
        self.request, self.profile, self.copying = request, request.profile, copying
        self.least = sys.maxsize
        """Bytes that the smallest plan found needs, as long as none fits."""
        self._manner: _Manner | None = None

    def fastest(self, given: Given, written: Sequence[Written]) -> Decisions | None:
        """Return the fastest decisions found that begin with ``given`` and fit; None if there are none.

        The later ``written`` are tried only if with the first one something has to be given up. The manner that is
        found best is kept for the next call.
        """
        if self._manner is None:
            attempts = sorted(self._attempts(given, written), key=_rank)
        else:
            manners = [replace(self._manner, early=early) for early in (True, False)]
            attempts = sorted((self._attempt(given, manner) for manner in manners), key=_rank)
        fitting = [a for a in attempts if a.seconds < float("inf")][:_MOST_FITTED]
        # What is too large even so may still be tightened, which is sometimes better than to give up more.
        tight = {a.manner.written: a for a in reversed(attempts) if a.seconds == float("inf")}
        smallest = min(attempts, key=lambda attempt: attempt.least_bytes)
        found = [
            *(self._fitted(attempt.decisions, attempt.manner) for attempt in fitting),
            *(self._fitted(attempt.least, attempt.manner) for attempt in tight.values()),
        ]
        best = min(filter(None, found), key=lambda item: item[0], default=None)
        best = best or self._fitted(smallest.least, smallest.manner)
        if best is None:
            return None
        _, decisions, self._manner = best
        return decisions

    def _fitted(self, decisions: Decisions, manner: _Manner) -> tuple[float, Decisions, _Manner] | None:
        fitted = fit(decisions, self.profile, self.request.capacity_bytes)
        if fitted.over > 0:
            self.least = min(self.least, self.request.capacity_bytes + fitted.over)
            return None
        return self._seconds(fitted.decisions, fitted.placement), fitted.decisions, manner

    def _attempts(self, given: Given, written: Sequence[Written]) -> list[_Attempt]:
        """Try one manner after the other, each time with what was best until then."""
        most = _LINK_PRICES[0]
        attempts = [
            self._attempt(given, _Manner(early=early, link_price=most, written=written[0])) for early in (True, False)
        ]
        best = min(attempts, key=_rank)
        if not best.given_up:
            return attempts
        for price in _LINK_PRICES[1:]:
            attempts.append(self._attempt(given, replace(best.manner, link_price=price)))
        best = min(attempts, key=_rank)
        return attempts + [self._attempt(given, replace(best.manner, written=other)) for other in written[1:]]

    def _attempt(self, given: Given, manner: _Manner) -> _Attempt:
        """Give up what has to be, the cheapest first."""
        profile, capacity_bytes = self.profile, self.request.capacity_bytes
        ladder = savings(profile, given, self.request.allowed, link_price=manner.link_price, copying=self.copying)
        least = self._decisions(given, ladder, manner)
        least_bytes = _needed_bytes(least, profile)
        low, high = 0, len(ladder)
        while low < high:
            middle = (low + high) // 2
            if _needed_bytes(self._decisions(given, ladder[:middle], manner), profile) <= capacity_bytes:
                high = middle
            else:
                low = middle + 1
        decisions = self._decisions(given, ladder[:low], manner)
        fits = low < len(ladder) or least_bytes <= capacity_bytes
        return _Attempt(
            manner=manner,
            decisions=decisions,
            seconds=self._seconds(decisions) if fits else float("inf"),
            given_up=low,
            least=least,
            least_bytes=least_bytes,
        )

    def _decisions(self, given: Given, steps: Sequence[Saving], manner: _Manner) -> Decisions:
        now = with_savings(given, steps)
        return to_decisions(self.profile, now.options, now.readings, written=manner.written, early=manner.early)

    def _seconds(self, decisions: Decisions, placement: Placement | None = None) -> float:
        request = self.request
        plan = build(
            decisions,
            self.profile,
            planner="memferry",
            budget_bytes=request.budget_bytes,
            host_budget_bytes=request.host_budget_bytes,
            placement=placement,
        )
        return simulate(plan, self.profile).iteration_time


def _rank(attempt: _Attempt) -> tuple[float, int]:
    return attempt.seconds, attempt.least_bytes


def _needed_bytes(decisions: Decisions, profile: Profile) -> int:
    """Return the bytes that ``decisions`` take, but for what the arena may lose to fragmentation."""
    steps = len(timeline(profile))
    arena = live_bytes([copy.lifetime(steps) for copy in device_copies(decisions, profile)], steps)
    return int(arena.max(initial=0)) + int(framework_bytes(decisions.usage, profile).max())
