"""The slowest of several processes, and how long the others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lt_offload.report.tables import table
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


def slowest(times: Sequence[ProcessTimes]) -> ProcessTimes | None:
    """Return the process that the others wait for; None where there is none that is clearly slower."""
    ordered = sorted(times, key=lambda one: -one.own_s)
    if len(ordered) < 2 or ordered[0].own_s - ordered[1].own_s <= _NOTICEABLE * ordered[0].step_s:
        return None
    return ordered[0]


def told(times: Sequence[ProcessTimes]) -> str:
    """Return who waits how long for whom, as the rest of a sentence about the processes; empty if there are none."""
    if not times:
        return ""
    longest = max(times, key=lambda one: one.waited_s)
    slow = slowest(times)
    if slow is None:
        return f"none is slower than all others; they wait {format_seconds(longest.waited_s)} of a step at most"
    others = sorted(one.own_s for one in times if one is not slow)
    return (
        f"{slow.name} is the slowest: its part of a step takes {format_seconds(slow.own_s)}, the others' "
        f"{format_seconds(others[len(others) // 2])}; {longest.name} waits {format_seconds(longest.waited_s)} of each"
    )


def process_table(times: Sequence[ProcessTimes]) -> str:
    """Return the rows of all processes, the slowest first."""
    rows = [
        [str(one.rank), one.host, *map(format_seconds, (one.step_s, one.own_s, one.waited_s))]
        for one in sorted(times, key=lambda one: -one.own_s)
    ]
    head = ("process", "machine", "step", "its own part", "waiting for others")
    return table(head, rows, numeric=(0, 2, 3, 4), label="Times of all processes")
