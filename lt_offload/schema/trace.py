"""A trace of an iteration, measured or simulated, in one form, so that comparing them is a subtraction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lt_offload.schema.files import Strict, load_json, save_json
from lt_offload.schema.lanes import LaneName

TRACE_SCHEMA = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Span(Strict):
    """One op on one lane; times in seconds from the start of the iteration."""

    op: int
    lane: LaneName
    label: str
    """e.g. ``"forward 3"``, ``"prefetch weight 4"``."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace(Strict):
    """One iteration in the steady state."""

    source: Literal["simulated", "measured"]
    iteration_time: float
    device_peak: int
    host_peak: int
    budget_bytes: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]
    """(time, device bytes in use from then on), ascending."""
    schema: int = TRACE_SCHEMA

    def busy(self, lane: LaneName) -> float:
        """Seconds during which ``lane`` works."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    def save(self, path: str | Path) -> Path:
        """Write JSON."""
        return save_json(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read JSON; raises ``PlanError`` if it is not a trace of this schema version."""
        return load_json(cls, path, schema=TRACE_SCHEMA)
