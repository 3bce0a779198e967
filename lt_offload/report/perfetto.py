"""Traces as Chrome trace events, for Perfetto and chrome://tracing.

The format is the JSON object format of the Trace Event specification: one thread per lane, complete events (``ph: X``)
for spans, counters (``ph: C``) for device memory and its budget; times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lt_offload.schema.lanes import LaneName, shown
from lt_offload.schema.trace import Trace

_PROCESS = 1


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """Return ``trace`` in the Trace Event format, ready for ``json.dump``."""
    # A simulated prefetch may begin before its iteration does; the viewers want times that are not negative.
    origin = min([0.0, *(span.start for span in trace.spans)])
    threads: dict[LaneName, int] = {}
    events = [_metadata("process_name", 0, name=f"lt_offload, one iteration ({trace.source})")]
    for thread, lane in enumerate(shown(span.lane for span in trace.spans), start=1):
        threads[lane.name] = thread
        events.append(_metadata("thread_name", thread, name=lane.title))
        events.append(_metadata("thread_sort_index", thread, sort_index=thread))
    # Of two spans that start together the longer one comes first: viewers nest by the order of events.
    for span in sorted(trace.spans, key=lambda span: (span.start, -span.end)):
        if span.lane in threads:
            events.append(
                {
                    "ph": "X",
                    "name": span.label,
                    "cat": span.label.partition(" ")[0] or span.lane,
                    "pid": _PROCESS,
                    "tid": threads[span.lane],
                    "ts": _microseconds(span.start - origin),
                    "dur": _microseconds(span.end - span.start),
                    "args": {"op": span.op},
                }
            )
    end = max((span.end for span in trace.spans), default=trace.iteration_time)
    for time in (0.0, max(end, trace.iteration_time) - origin):
        events.append(_counter("device budget", time, trace.budget_bytes))
    events += [_counter("device memory", time - origin, size) for time, size in trace.memory]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "source": trace.source,
            "iteration_s": trace.iteration_time,
            "device_peak_bytes": trace.device_peak,
            "host_peak_bytes": trace.host_peak,
        },
    }


def save_perfetto(trace: Trace, path: str | Path) -> Path:
    """Write ``trace`` for Perfetto to ``path``, making its folder, and return the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(to_perfetto(trace), separators=(",", ":")) + "\n", encoding="utf-8")
    return target


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(event: str, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": _PROCESS, "tid": thread, "args": args}


def _counter(name: str, time: float, size: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": _microseconds(time), "args": {"bytes": size}}
