"""Drawings as HTML with inline SVG: one iteration (four lanes, the memory curve, one time axis), curves and bars.

Every drawing is 1000 units wide and stretched to the width of the page; all text is HTML beside it, placed in percent.
So one drawing serves a wide screen, a phone and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from lt_offload.report.perfetto import LANES
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Span, Trace
from lt_offload.units import format_bytes, format_seconds

WIDTH = 1000.0
LANE_HEIGHT = 20
MEMORY_HEIGHT = 100
CHART_HEIGHT = 100
MAX_BARS = 2000
"""Bars per drawing; more are merged, so that the page stays small and quick for a model of any depth."""
MAX_POINTS = 500
"""Columns of the memory curve; each shows the most that was in use during its time."""
NUMBERED = 0.022
"""Computations that take at least this share of the axis carry their block's number."""
CHART_MARGIN = 0.03
"""Of a chart's width, left and right of the first and last point."""
LABEL_WIDTH = 11
"""Percent of a chart's width that the label of a point takes."""

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
}
"""CSS class of a bar, and what the legend calls it."""


# -- one iteration ---------------------------------------------------------------------------------------------------


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
    lanes = (span for span in trace.spans if span.lane in LANES)
    single = _mark_nested(bar for span in lanes for bar in _within(_bar(span, plan), trace.iteration_time))
    gap = trace.iteration_time / (2 * WIDTH)
    merged = _merge(single, gap, per_block=True)
    while len(merged) > MAX_BARS:
        gap *= 2
        merged = _merge(single, gap, per_block=False)
    return sorted(merged, key=lambda bar: (bar.nested, bar.start))


def _within(bar: Bar, period: float) -> Iterator[Bar]:
    """Yield ``bar`` in parts that lie within one iteration.

    Iterations repeat: what ends in the next one is seen at the beginning, what began in the one before at the end.
    """
    start = bar.start % period if period else bar.start
    left = bar.busy
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
        words = [*span.label.split(), "", ""]
        kind = next((k for k in (f"{words[0]}-{words[1]}", words[0]) if k in KINDS), "other")
        block, size = None, 0
    seconds = span.end - span.start
    return Bar(lane=span.lane, kind=kind, block=block, start=span.start, end=span.end, busy=seconds, bytes=size)


def _mark_nested(single: Iterable[Bar]) -> list[Bar]:
    outer: dict[LaneName, Bar] = {}
    marked = []
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


def iteration(trace: Trace, plan: Plan, blocks: Sequence[str], axis_s: float) -> str:
    """Return the drawing of one iteration.

    Args:
        trace: what happens when.
        plan: whose ops the trace's spans are.
        blocks: names of the blocks.
        axis_s: length of the time axis in seconds.
    """
    drawn = bars(trace, plan)
    lanes = "".join(_lane(lane, [bar for bar in drawn if bar.lane == lane], trace, blocks, axis_s) for lane in LANES)
    return (
        f'<div class="plot">{_grid(trace, axis_s)}{_phases(drawn, trace, axis_s)}'
        f"{lanes}{_memory(trace, axis_s)}{_ticks(axis_s)}</div>"
    )


def _lane(lane: LaneName, drawn: Sequence[Bar], trace: Trace, blocks: Sequence[str], axis_s: float) -> str:
    seconds = sum(bar.busy for bar in drawn if not bar.nested)
    busy = f"{min(1.0, seconds / trace.iteration_time):.0%} busy" if trace.iteration_time else ""
    rects = "".join(_rect(bar, blocks, axis_s) for bar in drawn)
    numbers = "".join(
        f'<i style="left:{_percent(bar.start / axis_s)};width:{_percent(bar.busy / axis_s)}">{bar.block}</i>'
        for bar in drawn
        if bar.kind in ("forward", "rerun", "backward") and bar.block is not None and bar.busy >= NUMBERED * axis_s
    )
    return (
        f'<div class="lane" data-lane="{lane}"><p>{LANES[lane]} <small>{busy}</small></p>'
        f'<div class="band">{_svg(LANE_HEIGHT, rects, LANES[lane])}{numbers}</div></div>'
    )


def _rect(bar: Bar, blocks: Sequence[str], axis_s: float) -> str:
    x = bar.start / axis_s * WIDTH
    width = max(bar.end / axis_s * WIDTH - x, 0.3)
    # Neighbouring blocks differ in shade, so that they can be told apart without a gap that would read as waiting.
    shade = " odd" if bar.block is not None and bar.block % 2 else ""
    top, height = (LANE_HEIGHT // 2, LANE_HEIGHT // 2) if bar.nested else (0, LANE_HEIGHT)
    title = escape(_title(bar, blocks))
    return (
        f'<rect class="{bar.kind}{shade}" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}">'
        f"<title>{title}</title></rect>"
    )


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


def _phases(drawn: Sequence[Bar], trace: Trace, axis_s: float) -> str:
    """Return the header that tells forwards and backwards apart."""
    ends: list[tuple[str, float]] = []
    for bar in sorted(drawn, key=lambda bar: bar.start):
        if bar.kind in _PHASES:
            if ends and ends[-1][0] == bar.kind:
                ends.pop()
            ends.append((bar.kind, bar.end))
    ends[-1:] = [(ends[-1][0] if ends else "backward", trace.iteration_time)]
    starts = [0.0, *(end for _, end in ends)]
    widths = [(kind, max(0.0, end - start)) for (kind, end), start in zip(ends, starts, strict=False)]
    parts = (f'<span style="width:{_percent(width / axis_s)}">{_PHASES[kind]}</span>' for kind, width in widths)
    return f'<div class="phases">{"".join(parts)}</div>'


_PHASES = {"forward": "forward", "backward": "backward and updates"}


def _memory(trace: Trace, axis_s: float) -> str:
    peak = max([trace.device_peak, *(size for _, size in trace.memory)])
    # A budget far above the peak (a large, nearly empty device) would flatten the curve; then it is told, not drawn.
    in_view = trace.budget_bytes <= 3 * peak or not peak
    top = 1.12 * max(peak, trace.budget_bytes if in_view else 0) or 1.0
    level = trace.budget_bytes / top
    drawn = label = ""
    if path := _curve(trace, axis_s, top):
        drawn = f'<path class="area" d="{path}V{MEMORY_HEIGHT}H0Z"/><path class="curve" d="{path}"/>'
    # A measured curve is sampled between steps; the peak is from the device's own account.
    drawn += _level("peak", peak / top)
    if in_view:
        drawn += _level("budget", level)
        budget = format_bytes(trace.budget_bytes)
        label = f'<b class="limit" style="bottom:{_percent(level)}">budget {budget}</b>'
    share = f", {peak / trace.budget_bytes:.1%} of the budget" if trace.budget_bytes else ""
    return (
        f'<div class="lane memory" data-lane="memory"><p>device memory <small>peak {format_bytes(peak)}{share}</small>'
        f'</p><div class="band tall">{_svg(MEMORY_HEIGHT, drawn, f"device memory: peak {format_bytes(peak)}{share}")}'
        f"{label}</div></div>"
    )


def _level(name: str, share: float) -> str:
    y = f"{MEMORY_HEIGHT * (1 - share):.2f}"
    return f'<line class="{name}" x1="0" x2="{WIDTH:g}" y1="{y}" y2="{y}"/>'


def _curve(trace: Trace, axis_s: float, top: float) -> str:
    """Return the memory curve as an SVG path of steps, or nothing if the trace has none."""
    if not trace.memory:
        return ""

    def column(time: float) -> int:
        return min(max(int(time / axis_s * MAX_POINTS), 0), MAX_POINTS - 1)

    level = [0] * (column(trace.iteration_time) + 1)
    starts = [0.0, *(time for time, _ in trace.memory[1:])]  # before the first sample there was no less
    ends = [*(time for time, _ in trace.memory[1:]), trace.iteration_time]
    for start, (_, size), end in zip(starts, trace.memory, ends, strict=True):
        for i in range(column(start), min(column(end), len(level) - 1) + 1):
            level[i] = max(level[i], size)
    heights = [f"{MEMORY_HEIGHT * (1 - size / top):.1f}" for size in level]
    path = f"M0 {heights[0]}"
    for i in range(1, len(heights)):
        if heights[i] != heights[i - 1]:
            path += f"H{i / MAX_POINTS * WIDTH:g}V{heights[i]}"
    return path + f"H{min(1.0, trace.iteration_time / axis_s) * WIDTH:.2f}"


def _grid(trace: Trace, axis_s: float) -> str:
    lines = "".join(f'<i style="left:{_percent(tick / axis_s)}"></i>' for tick in _tick_times(axis_s))
    return f'<div class="grid">{lines}<i class="end" style="left:{_percent(trace.iteration_time / axis_s)}"></i></div>'


def _ticks(axis_s: float) -> str:
    labels = "".join(
        f'<span style="left:{_percent(tick / axis_s)}">{format_seconds(tick)}</span>' for tick in _tick_times(axis_s)
    )
    return f'<div class="axis">{labels}</div>'


def _tick_times(axis_s: float) -> list[float]:
    """Return round times, about five of them."""
    raw = axis_s / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [step * i for i in range(int(axis_s / step * 0.985) + 1)]


def _svg(height: int, content: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{content}</svg>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def legend(drawn: Iterable[Bar]) -> str:
    """Return the legend for the kinds of bars that appear."""
    present = {bar.kind for bar in drawn}
    entries = "".join(f'<li><i class="{kind}"></i>{name}</li>' for kind, name in KINDS.items() if kind in present)
    return f'<ul class="legend">{entries}</ul>'


# -- curves and bars -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve; ``values`` are those of the chart's points, None where there is none."""

    name: str
    values: Sequence[float | None]
    main: bool = False
    """Whether its points are marked."""


def chart(
    title: str,
    xs: Sequence[float],
    lines: Sequence[Line],
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    chosen: int | None = None,
    nothing_below: float | None = None,
) -> str:
    """Return a figure.

    Args:
        title: what it shows.
        xs: where the points are, ascending.
        lines: the curves.
        x_text: how such an x is written.
        y_text: how a value is written.
        chosen: the point that stands out.
        nothing_below: where it begins to work, if some points are below.
    """
    known = [value for line in lines for value in line.values if value is not None]
    ticks = round_ticks(max(known, default=1.0))
    top = max(1.04 * max(known, default=1.0), ticks[-1])
    span = xs[-1] - xs[0] or 1.0

    def left(x: float) -> float:
        return 100 * (CHART_MARGIN + (1 - 2 * CHART_MARGIN) * (x - xs[0]) / span)

    grid = "".join(f'<p style="bottom:{100 * y / top:.2f}%"><span>{escape(y_text(y))}</span></p>' for y in ticks)
    curves = "".join(_line_path(line, [left(x) / 100 for x in xs], top) for line in lines)
    dots = "".join(
        f'<i class="dot{" chosen" if i == chosen else ""}" style="left:{left(xs[i]):.2f}%;bottom:{100 * y / top:.2f}%" '
        f'title="{escape(f"{x_text(xs[i])}: {y_text(y)}")}"></i>'
        for line in lines
        if line.main
        for i, y in enumerate(line.values)
        if y is not None
    )
    void = ""
    if nothing_below is not None and nothing_below > xs[0]:
        width = min(left(nothing_below), 100.0)
        void = f'<div class="void" style="width:{width:.2f}%" title="does not fit below {x_text(nothing_below)}"></div>'
    summary = _in_words(title, xs, lines, x_text, y_text)
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{_legend_of_others(lines)}</figcaption>'
        f'<div class="field">{void}{grid}{_svg(CHART_HEIGHT, curves, summary)}{dots}</div>'
        f'<div class="axis">{_labels([(left(x), x_text(x)) for x in xs])}</div></figure>'
    )


def _labels(places: Iterable[tuple[float, str]]) -> str:
    """Return the labels of an axis at ``(percent, text)``, ascending, without those that would cover the one before."""
    labels, free = "", 0.0
    for left, text in places:
        if left >= free:
            labels += f'<span style="left:{left:.2f}%">{escape(text)}</span>'
            free = left + LABEL_WIDTH
    return labels


def _line_path(line: Line, shares: Sequence[float], top: float) -> str:
    """Return the SVG path of ``line``, whose points are at ``shares`` of the width; ``top`` is the highest value."""
    path, pen = "", "M"
    for share, value in zip(shares, line.values, strict=True):
        if value is None:
            pen = "M"
            continue
        path += f"{pen}{WIDTH * share:.1f} {CHART_HEIGHT * (1 - value / top):.2f}"
        pen = "L"
    return f'<path class="{"line" if line.main else "line other"}" d="{path}"/>' if path else ""


def _legend_of_others(lines: Sequence[Line]) -> str:
    others = [line.name for line in lines if not line.main]
    return f' <small><i class="dash"></i>{escape(", ".join(others))}</small>' if others else ""


def _in_words(
    title: str,
    xs: Sequence[float],
    lines: Sequence[Line],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """Return the curve in words, for those who cannot see it."""
    [values] = [line.values for line in lines if line.main]
    return f"{title}: " + ", ".join(
        f"{y_text(y) if y is not None else 'nothing'} at {x_text(x)}" for x, y in zip(xs, values, strict=True)
    )


def round_ticks(limit: float) -> list[float]:
    """Return zero and round values up to about ``limit``, three to five of them."""
    if limit <= 0:
        return [0.0, 1.0]
    raw = limit / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * i for i in range(int(limit / step * 1.001) + 1)]


def bar_list(rows: Sequence[tuple[str, float | None, str]], *, chosen: int | None = None) -> str:
    """Return horizontal bars: name, length, and what is written beside it. Without a length there is only the text."""
    longest = max((length for _, length, _ in rows if length is not None), default=0.0) or 1.0

    def row(index: int, name: str, length: float | None, text: str) -> str:
        bar = "" if length is None else f'<i style="width:calc((100% - 5.5em) * {length / longest:.4f})"></i>'
        mark = ' class="chosen"' if index == chosen else ""
        return f"<dt>{escape(name)}</dt><dd{mark}>{bar}<span>{escape(text)}</span></dd>"

    return f'<dl class="times">{"".join(row(index, *values) for index, values in enumerate(rows))}</dl>'
