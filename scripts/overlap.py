"""How much of a recorded iteration's copies and host updates ran beside computations. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from lt_offload import Plan, Profile, Trace

Interval = tuple[float, float]


def overlap(trace: Trace, plan: Plan, profile: Profile) -> dict[str, dict[str, float | None]]:
    """Return what each lane of ``trace`` did; seconds, shares of its busy time, bytes per second.

    Args:
        trace: one iteration of ``plan``.
        plan: knows how many bytes each op moves.
        profile: knows how many bytes an update covers.
    """
    compute = _union([(span.start, span.end) for span in trace.spans if span.lane == "compute"])
    found: dict[str, dict[str, float | None]] = {"compute": {"busy_s": _length(compute)}}
    lanes = {
        lane: _union([(span.start, span.end) for span in trace.spans if span.lane == lane])
        for lane in ("h2d", "d2h", "host")
    }
    for lane, busy in lanes.items():
        seconds = _length(busy)
        moved = sum(
            sum(profile.tensors[t].bytes for t in plan.tensors(plan.ops[span.op]))
            if lane == "host"
            else plan.ops[span.op].bytes
            for span in trace.spans
            if span.lane == lane and span.op >= 0
        )
        found[lane] = {
            "busy_s": seconds,
            "beside_compute": _length(_common(busy, compute)) / seconds if seconds else None,
            "bytes_per_s": moved / seconds if seconds else None,
        }
    both = _length(_common(lanes["h2d"], lanes["d2h"]))
    for lane in ("h2d", "d2h"):
        seconds = _length(lanes[lane])
        found[lane]["beside_other_direction"] = both / seconds if seconds else None
    return found


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return where both unions have something."""
    return [(max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) < min(b, d)]


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)
