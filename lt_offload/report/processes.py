"""The slowest of several processes, and how long the others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lt_offload.units import format_seconds

_NOTICEABLE = 0.02
"""The slowest is named where its own time is longer than the next one's by more than this part of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessTimes:
    """Medians of one process, in seconds per step."""

    rank: int
    host: str
    step_s: float
    """From one step's beginning to the next one's, validation and checkpoints not counted."""
    waited_s: float
    """Of these, how long it waited for others, before a batch and before gradients are added up."""

    @property
    def own_s(self) -> float:
        """What it takes without the waiting."""
        return self.step_s - self.waited_s

    @property
    def name(self) -> str:
        """Its number and its machine."""
        return f"process {self.rank} on {self.host}"


def told(times: Sequence[ProcessTimes]) -> str:
    """Return who waits how long for whom, as the rest of a sentence about the processes; empty if there are none."""
    if not times:
        return ""
    longest = max(times, key=lambda one: one.waited_s)
    *others, second, slow = sorted(times, key=lambda one: one.own_s) if len(times) > 1 else (*times, *times)
    if slow.own_s - second.own_s <= _NOTICEABLE * slow.step_s:
        return f"none is slower than all others; they wait {format_seconds(longest.waited_s)} of a step at most"
    middle = [*others, second][len(others) // 2]
    return (
        f"{slow.name} is the slowest: its part of a step takes {format_seconds(slow.own_s)}, the others' "
        f"{format_seconds(middle.own_s)}; {longest.name} waits {format_seconds(longest.waited_s)} of each"
    )
