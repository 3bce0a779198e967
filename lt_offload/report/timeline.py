"""One iteration as a figure: lanes and memory in use over one axis of time, the measured one below the planned one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from lt_offload.report.page import LIMIT, thinned
from lt_offload.schema.lanes import LANE, LaneName, shown
from lt_offload.schema.trace import Span, Trace
from lt_offload.units import format_bytes, format_seconds

_RESOLUTION = 1000.0
"""An iteration divided by this is too short to be seen."""
_HEIGHT, _LEGEND = 400, 120

KINDS = {
    "forward": ("forward", "#6f9fd8"),
    "forward-again": ("forward that runs again", "#a9c4e6"),
    "backward": ("backward", "#2f5f9e"),
    "prefetch-weight": ("weights to device", "#3f9c78"),
    "offload-weight": ("weights to host", "#7cc0a3"),
    "offload-grad": ("gradients to host", "#d0664f"),
    "prefetch-state": ("optimizer state to device", "#8d73bd"),
    "offload-state": ("optimizer state to host", "#b7a4d8"),
    "prefetch-sum": ("sums of gradients to device", "#e39583"),
    "offload-sum": ("sums of gradients to host", "#e39583"),
    "prefetch-activation": ("activations to device", "#d9a13b"),
    "offload-activation": ("activations to host", "#e8c583"),
    # Those of the device lie within a backward: they are drawn after it, and so above it.
    "update": ("update", "#59616c"),
    "accumulate": ("gradients added up", "#8b929c"),
    "reduce": ("sums between machines", "#d0664f"),
    "other": ("other", "#8b929c"),
}
"""Kind of a bar: its name and colour."""


def bars(trace: Trace) -> list[Span]:
    """Return the spans of ``trace``, joined where a screen could not tell them apart: a deep model has thousands."""
    unseen = trace.iteration_time / _RESOLUTION
    joined: list[Span] = []
    last: dict[tuple[LaneName, str], int] = {}
    for span in sorted((span for span in trace.spans if span.lane in LANE), key=lambda span: span.start):
        key = span.lane, kind_of(span)
        at = last.get(key)
        before = joined[at] if at is not None else span
        alike = span.label == before.label or min(span.end - span.start, before.end - before.start) < unseen
        if at is not None and alike and span.start - before.end <= unseen:
            label = before.label if span.label == before.label else key[1].replace("-", " ")
            joined[at] = replace(before, label=label, end=max(before.end, span.end))
        else:
            last[key] = len(joined)
            joined.append(span)
    return joined


def kind_of(span: Span) -> str:
    """Return the kind of a span, by the words of its label; measured spans that are no op of the plan have one, too."""
    words = span.label.partition(",")[0].split()
    kind = "-".join(word for word in words if not word.isdecimal())
    return kind if kind in KINDS else "other"


def iteration(traces: Mapping[str, Trace]) -> Figure:
    """Return the figure of one iteration, as each of ``traces`` has it, by their titles."""
    titles = []
    for name, trace in traces.items():
        titles += [f"{name} {format_seconds(trace.iteration_time)}", memory_title(trace)]
    figure = make_subplots(
        rows=len(titles),
        row_heights=[0.6, 0.4] * len(traces),
        shared_xaxes=True,
        vertical_spacing=0.12 / len(traces),
        subplot_titles=titles,
    )
    named: set[str] = set()
    for row, trace in enumerate(traces.values()):
        _draw_lanes(figure, 2 * row + 1, trace, named)
        _draw_memory(figure, 2 * row + 2, trace)
    figure.update_layout(barmode="overlay", bargap=0.3, height=_LEGEND + _HEIGHT * len(traces), hovermode="closest")
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 9})
    figure.update_xaxes(tickformat="~s", ticksuffix="s")
    return figure


def memory_title(trace: Trace) -> str:
    """Return the peak of the device memory and the budget, in few enough words for a phone."""
    return f"memory {format_bytes(trace.device_peak)} of {format_bytes(trace.budget_bytes)}"


def _draw_lanes(figure: Figure, row: int, trace: Trace, named: set[str]) -> None:
    """Draw the bars; ``named`` are the kinds that the legend has."""
    whole = trace.iteration_time or 1.0
    lanes = {
        lane.name: f"{lane.title}<br>{trace.busy(lane.name) / whole:.0%} busy"
        for lane in shown(span.lane for span in trace.spans)
    }
    by_kind: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for bar in bars(trace):
        by_kind[kind_of(bar)].append(bar)
    for kind, some in by_kind.items():
        if not some:
            continue
        name, color = KINDS[kind]
        blocks = [next((word for word in bar.label.split() if word.isdecimal()), "") for bar in some]
        figure.add_bar(
            row=row,
            col=1,
            orientation="h",
            base=[bar.start for bar in some],
            x=[bar.end - bar.start for bar in some],
            y=[lanes[bar.lane] for bar in some],
            name=name,
            legendgroup=name,
            showlegend=name not in named,
            # Neighbouring blocks differ in shade, so that they can be told apart without a gap that would read as
            # waiting.
            marker={"color": color, "opacity": [0.75 if int(n or 0) % 2 else 1.0 for n in blocks], "line_width": 0},
            text=blocks,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[f"{b.label}: {format_seconds(b.end - b.start)} from {format_seconds(b.start)}" for b in some],
            hoverinfo="text",
        )
        named.add(name)
    figure.update_yaxes(row=row, col=1, categoryarray=list(lanes.values())[::-1], fixedrange=True)
    figure.add_vline(trace.iteration_time, row=row, col=1, line={"color": "#8b929c", "width": 1})


def _draw_memory(figure: Figure, row: int, trace: Trace) -> None:
    place: dict[str, Any] = {"row": row, "col": 1}
    points = thinned(trace.memory)
    if points:  # before the first sample there was no less
        points = [(0.0, points[0][1]), *points, (max(trace.iteration_time, points[-1][0]), points[-1][1])]
    figure.add_scatter(
        **place,
        x=[time for time, _ in points],
        y=[size for _, size in points],
        line={"shape": "hv", "color": "#4b5563", "width": 1.3},
        fill="tozeroy",
        name="device memory",
        showlegend=False,
        hovertext=[format_bytes(size) for _, size in points],
        hoverinfo="text",
    )
    figure.add_hline(trace.device_peak, **place, line={"color": "#4b5563", "width": 1, "dash": "dot"})
    figure.add_hline(trace.budget_bytes, **place, line=LIMIT)
    figure.update_yaxes(**place, rangemode="tozero", tickformat="~s", ticksuffix="B", nticks=4, fixedrange=True)
