"""Chrome trace events: the structure that Perfetto and chrome://tracing read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.report.perfetto import to_perfetto
from lt_offload.schema.lanes import MACHINE_LANES
from lt_offload.schema.trace import Span, Trace


@pytest.fixture
def trace() -> Trace:
    return Trace(
        source="simulated",
        iteration_time=0.5,
        device_peak=300,
        host_peak=900,
        budget_bytes=400,
        spans=(
            Span(op=2, lane="compute", label="update 0", start=0.3, end=0.4),
            Span(op=0, lane="h2d", label="prefetch weight 0", start=0.0, end=0.1),
            Span(op=3, lane="host", label="update 1", start=0.45, end=0.6),
            Span(op=1, lane="compute", label="backward 0", start=0.3, end=0.45),
            Span(op=4, lane="d2h", label="offload grad 1", start=0.4, end=0.45),
        ),
        memory=((0.0, 100), (0.1, 300), (0.45, 120)),
    )


def events(trace: Trace, phase: str) -> list[dict]:
    return [event for event in to_perfetto(trace)["traceEvents"] if event["ph"] == phase]


def test_each_lane_is_a_named_thread_in_drawing_order(trace: Trace) -> None:
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert [names[thread] for thread in sorted(names)] == [lane.title for lane in MACHINE_LANES]
    order = {e["tid"]: e["args"]["sort_index"] for e in events(trace, "M") if e["name"] == "thread_sort_index"}
    assert sorted(order, key=order.__getitem__) == sorted(names)


def test_spans_are_complete_events_in_microseconds(trace: Trace) -> None:
    complete = {event["args"]["op"]: event for event in events(trace, "X")}
    assert len(complete) == len(trace.spans)
    copy = complete[0]
    assert (copy["name"], copy["cat"], copy["ts"], copy["dur"]) == ("prefetch weight 0", "prefetch", 0.0, 1e5)
    assert complete[3]["ts"] + complete[3]["dur"] == pytest.approx(6e5)  # a host update may end in the next iteration


def test_times_are_not_negative(trace: Trace) -> None:
    early = Span(op=5, lane="h2d", label="prefetch weight 1", start=-0.2, end=0.0)
    moved = replace(trace, spans=(early, *trace.spans))
    starts = {event["args"]["op"]: event["ts"] for event in events(moved, "X")}
    assert (starts[5], starts[0], starts[2]) == (0.0, 2e5, 5e5)
    assert [e["ts"] for e in events(moved, "C") if e["name"] == "device memory"] == [2e5, 3e5, 6.5e5]


def test_the_enclosing_span_comes_first(trace: Trace) -> None:
    order = [event["name"] for event in events(trace, "X")]
    assert order.index("backward 0") < order.index("update 0")


def test_memory_and_budget_are_counters(trace: Trace) -> None:
    counters = events(trace, "C")
    memory = [(e["ts"], e["args"]["bytes"]) for e in counters if e["name"] == "device memory"]
    assert memory == [(0.0, 100), (1e5, 300), (4.5e5, 120)]
    budget = [(e["ts"], e["args"]["bytes"]) for e in counters if e["name"] == "device budget"]
    assert budget == [(0.0, 400), (6e5, 400)]
