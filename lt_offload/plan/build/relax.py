"""Gives copies more time where memory is not short. Knows the framework's memory, not the arena.

A computation waits until the memory that it takes over has been given back, and for activations that are still on
their way. Holding both for longer costs nothing but memory, and only in steps that have some left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import Bytes, backward_steps, framework_bytes
from lt_offload.schema.profile import Profile

_LATER = 8
"""Steps by which a departure is put off at most; longer ones would only fill the link's queue."""
_EARLIER = 2
"""Steps by which an arrival is brought forward at most; what is needed first should come first."""


@dataclass(slots=True)
class _Hold:
    """Bytes that are held to the end of step ``step``, or from its beginning; at the furthest to or from ``limit``."""

    bytes: int
    step: int
    limit: int
    block: int | None = None
    tensors: tuple[int, ...] = ()

    def extend(self, by: int, free: Bytes) -> None:
        """Hold for one step more in direction ``by`` if there are that many bytes."""
        step = self.step + by
        if step * by <= self.limit * by and free[step] >= self.bytes:
            free[step] -= self.bytes
            self.step = step


def relax(decisions: Decisions, profile: Profile, limit: int, *, earlier: bool) -> Decisions:
    """Return ``decisions`` with more time for copies, as far as at most ``limit`` bytes of framework memory allow.

    ``earlier``: not only departures may be put off, but arrivals brought forward as well. That delays other copies to
    the device, so it does not always pay.
    """
    free = limit - framework_bytes(decisions.usage, profile)
    departures = [*_departures(decisions, profile), *_gradients(decisions, profile)]
    arrivals = list(_arrivals(decisions, profile))
    for turn in range(_LATER):
        # Everybody gets one step before anybody gets two.
        for departure in departures:
            departure.extend(+1, free)
        for arrival in arrivals if earlier and turn < _EARLIER else ():
            arrival.extend(-1, free)
    blocks, tensors = list(decisions.blocks), list(decisions.tensors)
    for departure in departures:
        if departure.block is not None:
            blocks[departure.block] = replace(blocks[departure.block], release_after=departure.step)
        for tensor in departure.tensors:
            tensors[tensor] = replace(tensors[tensor], grad_release_after=departure.step)
    for arrival in arrivals:
        assert arrival.block is not None
        prefetch_at = max(arrival.step, (blocks[arrival.block].release_after or 0) + 1)
        blocks[arrival.block] = replace(blocks[arrival.block], prefetch_at=prefetch_at)
    return replace(decisions, blocks=tuple(blocks), tensors=tuple(tensors))


def _departures(decisions: Decisions, profile: Profile) -> Iterator[_Hold]:
    for index, (block, decision) in enumerate(zip(profile.blocks, decisions.blocks, strict=True)):
        if decision.release_after is not None and decision.prefetch_at is not None:
            yield _Hold(
                block.option(decision.option).offload_bytes,
                decision.release_after,
                decision.prefetch_at - 1,
                block=index,
            )


def _arrivals(decisions: Decisions, profile: Profile) -> Iterator[_Hold]:
    for index, (block, decision) in enumerate(zip(profile.blocks, decisions.blocks, strict=True)):
        if decision.release_after is not None and decision.prefetch_at is not None:
            yield _Hold(
                block.option(decision.option).offload_bytes,
                decision.prefetch_at,
                decision.release_after + 1,
                block=index,
            )


def _gradients(decisions: Decisions, profile: Profile) -> Iterator[_Hold]:
    """Gradients that leave together now leave together afterwards: each group is one copy."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        if decision.grad_release_after is not None:
            groups[backward_steps(tensor.blocks, profile)[-1], decision.grad_release_after].append(index)
    last = 2 * len(profile.blocks) - 1
    for (_, release_after), tensors in groups.items():
        yield _Hold(sum(profile.tensors[t].bytes for t in tensors), release_after, last, tensors=tuple(tensors))
