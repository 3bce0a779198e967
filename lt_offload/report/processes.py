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
    """Time from the start of a step to the start of the next one, without validation and checkpoints."""
    waited_s: float
    """The part of ``step_s`` spent waiting for other processes, before a batch and before gradients are added up."""

    @property
    def own_s(self) -> float:
        """Time of a step without the waiting."""
        return self.step_s - self.waited_s

    @property
    def name(self) -> str:
        """Its number and its machine."""
        return f"process {self.rank} on {self.host}"


def told(times: Sequence[ProcessTimes]) -> str:
    """Return the slowest process and the longest wait as the rest of a sentence; empty without ``times``."""
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
