"""Traces as Chrome trace events, for Perfetto and chrome://tracing.

The format is the JSON object format of the Trace Event specification: one thread per lane, complete events (``ph: X``)
for spans, counters (``ph: C``) for device memory and its budget; times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lt_offload.replacing import write_text
from lt_offload.schema.lanes import LaneName, shown
from lt_offload.schema.trace import Trace

_PROCESS = 1


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """Return ``trace`` in the Trace Event format, ready for ``json.dump``."""
    # A simulated prefetch may begin before its iteration does; the viewers want times that are not negative.
    origin = min([0.0, *(span.start for span in trace.spans)])

    def event(phase: str, name: str, *, thread: int | None = None, at: float | None = None, **more: Any) -> None:
        times = {} if at is None else {"ts": round((at - origin) * 1e6, 3)}
        threads = {} if thread is None else {"tid": thread}
        events.append({"ph": phase, "name": name, "pid": _PROCESS, **threads, **times, **more})

    threads: dict[LaneName, int] = {}
    events: list[dict[str, Any]] = []
    event("M", "process_name", thread=0, args={"name": f"lt_offload, one iteration ({trace.source})"})
    for thread, lane in enumerate(shown(span.lane for span in trace.spans), start=1):
        threads[lane.name] = thread
        event("M", "thread_name", thread=thread, args={"name": lane.title})
        event("M", "thread_sort_index", thread=thread, args={"sort_index": thread})
    # Of two spans that start together the longer one comes first: viewers nest by the order of events.
    for span in sorted(trace.spans, key=lambda span: (span.start, -span.end)):
        if span.lane in threads:
            kind = span.label.partition(" ")[0] or span.lane
            lasts = {"dur": round((span.end - span.start) * 1e6, 3), "cat": kind, "args": {"op": span.op}}
            event("X", span.label, thread=threads[span.lane], at=span.start, **lasts)
    end = max((span.end for span in trace.spans), default=trace.iteration_time)
    for time in (origin, max(end, trace.iteration_time)):
        event("C", "device budget", at=time, args={"bytes": trace.budget_bytes})
    for time, size in trace.memory:
        event("C", "device memory", at=time, args={"bytes": size})
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
    return write_text(Path(path), json.dumps(to_perfetto(trace), separators=(",", ":")) + "\n")
