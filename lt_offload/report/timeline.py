"""One iteration as a figure: four lanes and the memory curve over one time axis, to zoom into and to point at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lt_offload.report.drawing import OUT_OF_VIEW, Drawing, axis, frame, layout
from lt_offload.report.perfetto import TITLES, lanes_of
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Span, Trace
from lt_offload.units import format_bytes, format_seconds

MAX_BARS = 2000
"""Bars per drawing; more are merged, so that the page stays small and quick for a model of any depth."""
MAX_COLUMNS = 500
"""Columns of the memory curve; each shows the most that was in use during its time."""
HEIGHT = 400
_RESOLUTION = 2000.0
"""Bars that are nearer to each other than an iteration divided by this are drawn as one."""
_MEMORY = 0.31
"""Share of the height that the memory curve takes."""
_LANE = 0.5
"""Height of a bar where lanes are 1 apart; above it is the lane's name."""
_NUMBERED = ("forward", "rerun", "backward")
"""Kinds that carry their block's number where there is room."""
_PHASES = {"forward": "forward", "backward": "backward"}
_LEAST_PHASE = 0.2
"""The share of the axis that a phase takes whose name is written above it."""

KINDS = {
    "forward": "forward",
    "rerun": "forward that runs again",
    "backward": "backward",
    "prefetch-weight": "weights to device",
    "offload-weight": "weights to host",
    "offload-grad": "gradients to host",
    "prefetch-state": "optimizer state to device",
    "offload-state": "optimizer state to host",
    "prefetch-sum": "sums of gradients to device",
    "offload-sum": "sums of gradients to host",
    "prefetch-activation": "activations to device",
    "offload-activation": "activations to host",
    "update": "update",
    "accumulate": "gradients added up",
    "reduce": "sums between machines",
}
"""Kind of a bar, and what the legend calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Ops of one kind that follow each other on a lane, usually of one block."""

    lane: LaneName
    kind: str
    block: int | None
    start: float
    end: float
    busy: float
    """Seconds of work; less than ``end - start`` if there were small gaps."""
    ops: int = 1
    bytes: int = 0
    nested: bool = False
    """Whether it lies within a longer bar of its lane, as device updates do within their backward."""


def bars(trace: Trace, plan: Plan) -> list[Bar]:
    """Return what to draw for ``trace``, at most :data:`MAX_BARS`, in drawing order."""
    lanes = (span for span in trace.spans if span.lane in TITLES)
    single = _mark_nested(bar for span in lanes for bar in _within(_bar(span, plan), trace.iteration_time))
    gap = trace.iteration_time / _RESOLUTION
    merged = _merge(single, gap, per_block=True)
    while len(merged) > MAX_BARS:
        # Coarser until few enough are left, and across blocks: a deep model may have more blocks than there is room
        # for.
        gap *= 2
        merged = _merge(single, gap, per_block=False)
    # Bars within others come last, so that they are drawn on top.
    return sorted(merged, key=lambda bar: (bar.nested, bar.start))


def _within(bar: Bar, period: float) -> Iterator[Bar]:
    """Yield ``bar`` in parts that lie within one iteration.

    Iterations repeat: what ends in the next one is seen at the beginning, what began in the one before at the end.
    """
    start = bar.start % period if period else bar.start
    left = bar.busy
    # A little more than the period, or a bar that ends with it would leave a rest of no length.
    while left > 0 and period and start + left > period * (1 + 1e-9):
        part = period - start
        yield replace(bar, start=start, end=period, busy=part, bytes=round(bar.bytes * part / bar.busy))
        start, left = 0.0, left - part
    share = left / bar.busy if bar.busy else 1.0
    yield replace(bar, start=start, end=start + left, busy=left, bytes=round(bar.bytes * share))


def _bar(span: Span, plan: Plan) -> Bar:
    """Return one span as a bar; its label tells what it is if it is no op of the plan."""
    if 0 <= span.op < len(plan.ops):
        op = plan.ops[span.op]
        kind = f"{op.kind}-{op.payload}" if op.kind in ("prefetch", "offload") else op.kind
        if op.save is not None:
            kind = "rerun"
        block, size = op.block, op.bytes
    else:
        # What was measured and is no op of the plan says its kind in words.
        words = [*span.label.split(), "", ""]
        kind = next((k for k in (f"{words[0]}-{words[1]}", words[0]) if k in KINDS), "other")
        block, size = None, 0
    seconds = span.end - span.start
    return Bar(lane=span.lane, kind=kind, block=block, start=span.start, end=span.end, busy=seconds, bytes=size)


def _mark_nested(single: Iterable[Bar]) -> list[Bar]:
    outer: dict[LaneName, Bar] = {}
    marked = []
    # Of bars that begin together the longest first: it is the one around the others.
    for bar in sorted(single, key=lambda bar: (bar.start, -bar.end)):
        around = outer.get(bar.lane)
        if around and bar.end <= around.end and bar.kind != around.kind:
            marked.append(replace(bar, nested=True))
        else:
            outer[bar.lane] = bar
            marked.append(bar)
    return marked


def _merge(single: Sequence[Bar], gap: float, *, per_block: bool) -> list[Bar]:
    """Join bars of one kind (and block) that are at most ``gap`` seconds apart."""
    merged: list[Bar] = []
    last: dict[tuple[LaneName, bool], Bar] = {}
    for bar in single:
        key = bar.lane, bar.nested
        before = last.get(key)
        joins = before is not None and before.kind == bar.kind and bar.start - before.end <= gap
        if before is not None and joins and (before.block == bar.block or not per_block):
            last[key] = replace(
                before,
                block=before.block if before.block == bar.block else None,
                end=max(before.end, bar.end),
                busy=before.busy + bar.busy,
                ops=before.ops + bar.ops,
                bytes=before.bytes + bar.bytes,
            )
        else:
            merged += [before] if before else []
            last[key] = bar
    return merged + list(last.values())


def iteration(trace: Trace, plan: Plan, blocks: Sequence[str], axis_s: float, *, caption: str) -> str:
    """Return the figure of one iteration.

    Args:
        trace: what happens when.
        plan: whose ops the trace's spans are.
        blocks: names of the blocks.
        axis_s: length of the time axis in seconds.
        caption: HTML above it.
    """
    scale, unit = (1.0, "s") if axis_s >= 1 else (1e3, "ms") if axis_s >= 1e-3 else (1e6, "us")
    drawn = Drawing()
    found = bars(trace, plan)
    _draw_lanes(drawn, found, trace, blocks, scale)
    top = _draw_memory(drawn, trace, axis_s, scale)
    _name_phases(drawn, found, trace, axis_s, scale)
    end = axis_s * scale
    drawn.layout = layout(
        # Bars within others share their lane; stacked, they would be moved aside.
        barmode="overlay",
        bargap=0,
        uniformtext={"mode": "hide", "minsize": 9},
        hovermode="closest",
        dragmode="zoom",
        margin={"l": 4, "r": 4, "t": 18, "b": 22},
        xaxis=axis(
            anchor="y2", range=[0, end], ticksuffix=f" {unit}", nticks=7, showline=True, minallowed=0, maxallowed=end
        ),
        yaxis=axis(
            domain=[_MEMORY + 0.07, 1], range=[len(lanes_of(trace)) - 0.6, -0.75], showticklabels=False, showgrid=False,
            fixedrange=True,
        ),
        yaxis2=axis(domain=[0, _MEMORY], range=[0, top], showticklabels=False, nticks=3, fixedrange=True),
    )  # fmt: skip
    busy = ", ".join(f"{TITLES[lane]} {_busy(found, lane, trace)}" for lane in lanes_of(trace))
    label = f"{trace.source} iteration of {format_seconds(trace.iteration_time)}: {busy}; {_peak(trace)}"
    return frame(drawn, caption=caption, label=label, height=HEIGHT, kind="iteration")


def _draw_lanes(drawn: Drawing, found: Sequence[Bar], trace: Trace, blocks: Sequence[str], scale: float) -> None:
    height = {lane: number for number, lane in enumerate(lanes_of(trace))}
    for lane, number in height.items():
        drawn.shapes.append(
            {
                "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": number - _LANE / 2, "y1": number + _LANE / 2,
                "layer": "below", "line": {"width": 0}, "fillcolor": "var(--bed)",
            }
        )  # fmt: skip
        place = {"xref": "paper", "x": 0, "xanchor": "left", "y": number - _LANE / 2, "yanchor": "bottom"}
        drawn.say(f"{TITLES[lane]} <span style='color:var(--faint)'>{_busy(found, lane, trace)}</span>", place)
    by_kind: dict[tuple[str, bool], list[Bar]] = defaultdict(list)
    for bar in found:
        by_kind[bar.kind, bar.nested].append(bar)
    for (kind, nested), some in sorted(by_kind.items(), key=lambda item: item[0][1]):
        down = _LANE / 4 if nested else 0.0
        numbered = kind in _NUMBERED
        drawn.traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "base": [_figure(bar.start * scale) for bar in some],
                "x": [_figure((bar.end - bar.start) * scale) for bar in some],
                "y": [height[bar.lane] + down for bar in some],
                "width": _LANE / 2 if nested else _LANE,
                "name": KINDS.get(kind, kind),
                # Neighbouring blocks differ in shade, so that they can be told apart without a gap that would read as
                # waiting.
                "marker": {
                    "color": f"var(--{colour(kind)})" if kind in KINDS else "var(--faint)",
                    "opacity": [0.8 if bar.block is not None and bar.block % 2 else 1.0 for bar in some],
                    "line": {"width": 0},
                },
                "text": [str(bar.block) if numbered and bar.block is not None else "" for bar in some],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": "#fff", "size": 11},
                "hovertext": [_title(bar, blocks) for bar in some],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )


def _busy(found: Sequence[Bar], lane: LaneName, trace: Trace) -> str:
    seconds = sum(bar.busy for bar in found if bar.lane == lane and not bar.nested)
    return f"{min(1.0, seconds / trace.iteration_time):.0%} busy" if trace.iteration_time else ""


def _figure(value: float) -> float:
    """Return a place with as many digits as a screen can show at a large zoom: the page is smaller."""
    return float(f"{value:.7g}")


def _name_phases(drawn: Drawing, found: Sequence[Bar], trace: Trace, axis_s: float, scale: float) -> None:
    """Tell forwards and backwards apart, above the lanes."""
    ends: list[tuple[str, float]] = []
    for bar in sorted(found, key=lambda bar: bar.start):
        if bar.kind in _PHASES:
            # Of neighbours of one kind the last one ends the phase.
            if ends and ends[-1][0] == bar.kind:
                ends.pop()
            ends.append((bar.kind, bar.end))
    start = 0.0
    for index, (kind, end) in enumerate(ends):
        until = trace.iteration_time if index == len(ends) - 1 else end
        if index:
            x, line = start * scale, {"color": "var(--faint)", "width": 1}
            drawn.shapes.append(
                {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": _MEMORY + 0.07, "y1": 1.04, "line": line}
            )
        if until - start >= _LEAST_PHASE * axis_s and (kind == "backward" or not index):
            place = {"x": start * scale, "xanchor": "left", "yref": "paper", "y": 1, "yanchor": "bottom", "xshift": 2}
            drawn.say(_PHASES[kind], place, size=11, color="var(--faint)")
        start = until


def _draw_memory(drawn: Drawing, trace: Trace, axis_s: float, scale: float) -> float:
    """Draw device memory below the lanes; return the top of its axis."""
    peak = _device_peak(trace)
    # A budget far above the peak (a large, nearly empty device) would flatten the curve; then it is told, not drawn.
    in_view = trace.budget_bytes <= OUT_OF_VIEW * peak or not peak
    top = 1.3 * max(peak, trace.budget_bytes if in_view else 0) or 1.0
    times, sizes = columns(trace, axis_s)
    if times:
        drawn.traces.append(
            {
                "type": "scatter",
                "x": [_figure(time * scale) for time in times],
                "y": sizes,
                "yaxis": "y2",
                "mode": "lines",
                "line": {"shape": "hv", "color": "var(--curve)", "width": 1.3},
                "fill": "tozeroy",
                "fillcolor": "var(--area)",
                "name": "device memory",
                "hovertext": [format_bytes(size) for size in sizes],
                "hovertemplate": "%{hovertext} in use<extra></extra>",
            }
        )
    # A measured curve is sampled between steps; the peak is from the device's own account.
    line = {"color": "var(--curve)", "width": 1, "dash": "dot"}
    drawn.shapes.append(
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": peak, "y1": peak, "line": line}
    )
    if in_view:
        drawn.level(trace.budget_bytes, f"budget {format_bytes(trace.budget_bytes)}", yref="y2")
    drawn.say(
        _peak(trace), {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": _MEMORY, "yanchor": "bottom"}
    )
    return top


def _device_peak(trace: Trace) -> int:
    return max([trace.device_peak, *(size for _, size in trace.memory)])


def _peak(trace: Trace) -> str:
    peak = _device_peak(trace)
    share = f", {peak / trace.budget_bytes:.1%} of the budget" if trace.budget_bytes else ""
    return f"device memory: peak {format_bytes(peak)}{share}"


def columns(trace: Trace, axis_s: float) -> tuple[list[float], list[int]]:
    """Return times and the bytes in use from then on: the most of each column of the axis; nothing if not known."""
    if not trace.memory:
        return [], []

    def column(time: float) -> int:
        return min(max(int(time / axis_s * MAX_COLUMNS), 0), MAX_COLUMNS - 1)

    most = [0] * (column(trace.iteration_time) + 1)
    starts = [0.0, *(time for time, _ in trace.memory[1:])]  # before the first sample there was no less
    ends = [*(time for time, _ in trace.memory[1:]), trace.iteration_time]
    for start, (_, size), end in zip(starts, trace.memory, ends, strict=True):
        for i in range(column(start), min(column(end), len(most) - 1) + 1):
            most[i] = max(most[i], size)
    changes = [i for i in range(len(most)) if i == 0 or most[i] != most[i - 1]]
    times = [i / MAX_COLUMNS * axis_s for i in changes]
    return [*times, min(axis_s, trace.iteration_time)], [*(most[i] for i in changes), most[-1]]


def _title(bar: Bar, blocks: Sequence[str]) -> str:
    parts = [KINDS.get(bar.kind, bar.kind)]
    if bar.block is not None:
        parts[0] += f", block {bar.block}"
        parts += [blocks[bar.block]] if bar.block < len(blocks) else []
    parts.append(f"{format_seconds(bar.busy)} from {format_seconds(bar.start)}")
    if bar.bytes and bar.lane == "compute" and not bar.kind.startswith("offload"):
        parts.append(f"reads {format_bytes(bar.bytes)} in host memory")
    elif bar.bytes:
        rate = f" at {format_bytes(bar.bytes / bar.busy)}/s" if bar.busy > 0 else ""
        parts.append(f"{format_bytes(bar.bytes)}{rate}")
    if bar.ops > 1:
        parts.append(f"{bar.ops} operations")
    return " · ".join(parts)


def colour(kind: str) -> str:
    """Return the name in the style sheet of the colour of bars of a kind."""
    return "grad" if kind == "reduce" else kind


def legend(drawn: Iterable[Bar]) -> str:
    """Return the legend for the kinds of bars that appear."""
    present = {bar.kind for bar in drawn}
    entries = "".join(
        f'<li><i style="background:var(--{colour(kind)})"></i>{name}</li>'
        for kind, name in KINDS.items()
        if kind in present
    )
    return f'<ul class="legend">{entries}</ul>'
