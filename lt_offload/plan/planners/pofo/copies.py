"""When activations travel that have been chosen to be offloaded. Knows moments in time, bytes and rates.

POFO (NeurIPS 2021) lets memory come and go with every byte of a copy. Whole buffers come and go at once, so the times
are chosen anew: each copy gets as many moments as it needs to run beside the computations, where the memory has room.
A moment is a step of a plan, or a computation of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.iteration.computations import computations
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import framework_bytes
from lt_offload.schema.profile import Profile


@dataclass(slots=True)
class Travel:
    """What is offloaded together."""

    index: int
    """Of the block, or of the item."""
    bytes: int
    release_after: int
    """The moment at whose end its device memory is given back."""
    needed: int
    """The moment that needs it again."""
    fetch: int
    """The moment at whose beginning it takes memory again."""


def with_copies(decisions: Decisions, profile: Profile, room: int) -> Decisions | None:
    """Return ``decisions`` with steps for all that travels; None if the framework needs more than ``room`` bytes."""
    travels = _tight(decisions, profile)
    found = _apply(decisions, travels)
    free = room - framework_bytes(found.usage, profile)
    if free.min() < 0:
        return None
    if not travels:
        return found
    starts = _starts(decisions, profile)
    for slack in (0, 1):
        begin = [begin - slack for begin in latest_fetches(travels, starts, profile.hardware.h2d_bytes_per_s)]
        fetch_earlier(travels, free, begin, first=len(profile.blocks))
        _release_later(travels, free, starts, profile, slack)
    return _apply(decisions, travels)


def _tight(decisions: Decisions, profile: Profile) -> list[Travel]:
    """Return what travels, in the order of the forwards, each copy within its own step."""
    found = []
    for at, (block, decision) in enumerate(zip(profile.blocks, decisions.blocks, strict=True)):
        nbytes = block.option(decision.option).offload_bytes if block.has_backward else 0
        if nbytes:
            needed = decisions.activations_needed(at)
            found.append(Travel(index=at, bytes=nbytes, release_after=at, needed=needed, fetch=needed))
    return found


def _apply(decisions: Decisions, travels: list[Travel]) -> Decisions:
    blocks = list(decisions.blocks)
    for travel in travels:
        blocks[travel.index] = replace(
            blocks[travel.index], release_after=travel.release_after, prefetch_at=travel.fetch
        )
    return replace(decisions, blocks=tuple(blocks))


def _starts(decisions: Decisions, profile: Profile) -> NDArray[np.float64]:
    """Return when each step begins if no copy delays it, and when the last one ends."""
    seconds = np.zeros(2 * len(profile.blocks))
    for computation in computations([block.option for block in decisions.blocks], decisions.recomputations, profile):
        seconds[computation.step] += computation.seconds
    for tensor in profile.tensors:
        if tensor.trainable:
            seconds[len(seconds) - 1 - tensor.blocks[0]] += tensor.bytes / profile.optimizer.device_bytes_per_s
    return np.concatenate([[0.0], np.cumsum(seconds)])


def latest_fetches(travels: Sequence[Travel], starts: NDArray[np.float64], bytes_per_s: float) -> list[int]:
    """Return, per travel, the moment in which its copy has to begin so that no computation waits for it.

    ``starts`` has the time at which each moment begins, and at which the last one ends.
    """
    begin = [0] * len(travels)
    latest = float(starts[-1])
    for at in sorted(range(len(travels)), key=lambda at: -travels[at].needed):
        latest = min(latest, float(starts[travels[at].needed])) - travels[at].bytes / bytes_per_s
        begin[at] = int(np.searchsorted(starts, latest, side="right")) - 1
    return begin


def fetch_earlier(travels: Sequence[Travel], free: NDArray[np.int64], begin: Sequence[int], *, first: int) -> None:
    """Let each copy take memory in the moment ``begin``, or as soon after as there is ``free`` memory from then on.

    None does before ``first``. Copies queue in the order of need; none is worth its memory before the one ahead of it.
    """
    for at in sorted(range(len(travels)), key=lambda at: (travels[at].needed, -travels[at].index)):
        travel = travels[at]
        earliest = max(begin[at], first, travel.release_after + 1)
        while travel.fetch > earliest and free[travel.fetch - 1] >= travel.bytes:
            travel.fetch -= 1
            free[travel.fetch] -= travel.bytes
        first = max(first, travel.fetch)


def _release_later(
    travels: list[Travel], free: NDArray[np.int64], starts: NDArray[np.float64], profile: Profile, slack: int
) -> None:
    """Keep the memory of each offload until its copy has ended, as far as there is room."""
    done = 0.0
    for travel in travels:
        done = max(done, float(starts[travel.index + 1])) + travel.bytes / profile.hardware.d2h_bytes_per_s
        last = min(int(np.searchsorted(starts, done, side="left")) - 1 + slack, travel.fetch - 1)
        while travel.release_after < last and free[travel.release_after + 1] >= travel.bytes:
            travel.release_after += 1
            free[travel.release_after] -= travel.bytes
