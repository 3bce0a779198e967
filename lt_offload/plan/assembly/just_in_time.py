"""Looks for the division of the device's memory, and the way to fill the arena, with which decisions run fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lt_offload.plan.assembly.ranges import Policy
from lt_offload.plan.assembly.schedule import Timetable, schedule, schedule_in_place
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.schema.profile import Profile

_SHARES = (0.5, 0.25, 0.75)
"""Parts of what may go to either that the arena gets, the best guess first."""
_FINER = 1 / 8
_WAYS: tuple[tuple[Policy, float], ...] = (
    ("next", 0.95),
    ("lowest", 1.0),
    ("oldest", 0.95),
    ("next", 0.9),
    ("lowest", 0.9),
    ("oldest", 0.8),
)
"""How to fill the arena, and how full."""
_ENOUGH = 1.001
"""A schedule that is this near to the sum of the computations is not improved any more; only its arena gets smaller."""
_SMALLER = 5
"""How often it is halved at most."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """There is no schedule: by how many bytes the decisions miss the capacity, at least 1."""

    bytes: int


def just_in_time(
    decisions: Decisions, profile: Profile, capacity_bytes: int, *, quick: bool = False, hopeless_s: float = math.inf
) -> Timetable | Misfit:
    """Return the fastest schedule found for the sets of ``decisions`` within ``capacity_bytes``.

    Args:
        decisions: of which only the sets count.
        profile: what model and machine cost.
        capacity_bytes: of device memory, for all that is decided about.
        quick: try a few schedules only, to compare sets.
        hopeless_s: do so, too, if the fastest of those takes longer than this.
    """
    sets = Sets(decisions, profile)
    room = capacity_bytes - sets.least_arena - sets.least_framework
    if room < 0:
        return Misfit(-room)
    useful = min(room, sets.most_arena - sets.least_arena)
    enough = _ENOUGH * sum(sets.seconds)
    best: Timetable | None = None
    share = _SHARES[0]
    for attempt in _attempts():
        if best is not None and not attempt.coarse and (quick or best.seconds > hopeless_s):
            break
        part = attempt.share if attempt.coarse else min(max(share + attempt.share, 0.0), 1.0)
        arena = sets.least_arena + int(part * useful)
        found = schedule(sets, arena, capacity_bytes - arena, part=attempt.full, policy=attempt.policy)
        if found is not None and (best is None or found.seconds < best.seconds):
            best, share = found, part
            if best.seconds <= enough:
                break
    for _ in range(_SMALLER if best is not None and best.seconds <= enough and not quick else 0):
        share /= 2
        arena = sets.least_arena + int(share * useful)
        found = schedule(sets, arena, capacity_bytes - arena)
        if found is None or found.seconds > enough:
            break
        best = found
    if best is not None or quick:
        return best or Misfit(1)
    arena = sets.tight_arena
    over = arena + sets.least_framework - capacity_bytes
    return schedule_in_place(sets, arena, capacity_bytes - arena) if over <= 0 else Misfit(over)


@dataclass(frozen=True, slots=True)
class _Division:
    """One way to schedule."""

    coarse: bool
    """Whether ``share`` is a share of its own; else it is added to that of the best so far."""
    share: float
    policy: Policy
    full: float


def _attempts() -> Iterator[_Division]:
    (policy, full), *others = _WAYS
    for share in _SHARES:
        yield _Division(True, share, policy, full)
    for policy, full in others:
        yield _Division(False, 0.0, policy, full)
    for step in (-_FINER, _FINER):
        for policy, full in _WAYS[:2]:
            yield _Division(False, step, policy, full)
