"""Draws iterations of plans for the documentation: lanes above the device memory, as small SVG files.

python -m scripts.docs.pictures [--out docs/pictures] [--only NAME ...]

Everything drawn is simulated, on the machines that configs/hardware/ describes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import lt_offload
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Span, Trace
from lt_offload.units import format_bytes, format_seconds
from scripts.common import ROOT

PICTURES = {
    "llama2-7b-12gb": ("Llama-2-7B, every weight in fp32, 4 x 512 tokens, 12 GB", "llama2-7b", "12GB", "auto"),
    "llama2-7b-6gb": ("Llama-2-7B, every weight in fp32, 4 x 512 tokens, 6 GB", "llama2-7b", "6GB", "auto"),
    "tinyllama-l2l": ("TinyLlama-1.1B in fp32, 4 x 512 tokens, 4 GB, planner l2l", "tinyllama-1.1b", "4GB", "l2l"),
    "tinyllama-auto": ("TinyLlama-1.1B in fp32, 4 x 512 tokens, 4 GB, planner auto", "tinyllama-1.1b", "4GB", "auto"),
}
"""Title, configuration, memory and planner of each, on an RTX 3060."""
LANES: dict[LaneName, str] = {
    "compute": "computations",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "host": "updates on the host",
}
COLOURS = {
    "forward": ("#4c78a8", "forward"),
    "again": ("#9ecae9", "forward again"),
    "backward": ("#274b73", "backward"),
    "update": ("#d1495b", "update"),
    "weight": ("#3a9278", "weights"),
    "grad": ("#e39b3b", "gradients"),
    "state": ("#8d6e63", "optimizer states"),
    "activation": ("#8e6bb0", "activations"),
}
WIDTH, LEFT, BAR, GAP, MEMORY = 960.0, 150.0, 22.0, 8.0, 110.0
COLUMNS = 480
"""Of the curve of memory."""


def kind(span: Span, plan: Plan) -> str:
    """Return the colour's name of what a span shows."""
    if not 0 <= span.op < len(plan.ops):
        return "update" if span.label.startswith("update") else "forward"
    op = plan.ops[span.op]
    if op.kind in ("prefetch", "offload"):
        return "grad" if op.payload == "sum" else str(op.payload)
    if op.kind in ("update", "accumulate"):
        return "update"
    return "again" if op.save is not None else op.kind


def bars(trace: Trace, plan: Plan, lane: LaneName) -> list[tuple[float, float, str]]:
    """Return (start, end, kind) of what a lane does within one iteration, neighbours of one kind as one bar."""
    period = trace.iteration_time
    pieces = sorted(piece for span in trace.spans if span.lane == lane for piece in _within(span, plan, period))
    merged: list[tuple[float, float, str]] = []
    for start, end, colour in pieces:
        if merged and merged[-1][2] == colour and start - merged[-1][1] < period / (2 * COLUMNS):
            merged[-1] = (merged[-1][0], max(merged[-1][1], end), colour)
        else:
            merged.append((start, end, colour))
    return merged


def _within(span: Span, plan: Plan, period: float) -> Iterator[tuple[float, float, str]]:
    """Yield the parts of a span that lie within the iteration; what ends in the next one is seen at its beginning."""
    start, colour = span.start % period, kind(span, plan)
    end = start + span.end - span.start
    yield start, min(end, period), colour
    if end > period:
        yield 0.0, end - period, colour


def draw(plan: Plan, trace: Trace, title: str) -> str:
    """Return the drawing of a simulated iteration as SVG."""
    scale = (WIDTH - LEFT - 20) / trace.iteration_time
    top = 58.0
    parts = [_text(LEFT, 20, title, size=15, weight=600)]
    predicted = plan.predicted
    told = (
        f"simulated: {format_seconds(trace.iteration_time)} per iteration; at least "
        f"{format_seconds(predicted.lower_bound_s)}; {format_seconds(predicted.no_offload_s)} with enough memory; "
        f"planner {plan.planner}"
    )
    parts.append(_text(LEFT, 40, told, colour="#555"))
    used = set()
    for lane, name in LANES.items():
        drawn = bars(trace, plan, lane)
        busy = sum(end - start for start, end, _ in drawn) / trace.iteration_time
        parts.append(_text(LEFT - 10, top + 15, name, anchor="end"))
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 20}" height="{BAR}" fill="#f1f1f1"/>')
        for start, end, colour in drawn:
            used.add(colour)
            width = max(0.4, (end - start) * scale)
            x = LEFT + start * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[colour][0]}"/>'
            )
        parts.append(_text(WIDTH - 16, top + 15, f"{min(1.0, busy):.0%}", size=10, colour="#777"))
        top += BAR + GAP
    parts += _memory(trace, scale, top + 6)
    top += MEMORY + 32
    for tick in _ticks(trace.iteration_time):
        parts.append(_text(LEFT + tick * scale, top - 8, format_seconds(tick), anchor="middle", colour="#777"))
    parts += _legend(used, top + 14)
    height = top + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 30:g} {height:g}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}, simulated">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _memory(trace: Trace, scale: float, top: float) -> list[str]:
    high = 1.08 * max(trace.budget_bytes, trace.device_peak)
    level = [0] * COLUMNS
    times = [0.0, *(time for time, _ in trace.memory[1:]), trace.iteration_time]
    for (start, end), (_, size) in zip(zip(times, times[1:], strict=False), trace.memory, strict=True):
        first, last = (int(min(time / trace.iteration_time, 1.0) * (COLUMNS - 1)) for time in (start, end))
        for column in range(first, last + 1):
            level[column] = max(level[column], size)
    step = trace.iteration_time * scale / COLUMNS
    path = "".join(f"L{LEFT + i * step:.1f} {top + MEMORY * (1 - size / high):.1f}" for i, size in enumerate(level))
    right, bottom = LEFT + trace.iteration_time * scale, top + MEMORY
    budget = top + MEMORY * (1 - trace.budget_bytes / high)
    return [
        _text(LEFT - 10, top + MEMORY / 2, "device memory", anchor="end"),
        _text(LEFT - 10, top + MEMORY / 2 + 16, f"peak {format_bytes(trace.device_peak)}", anchor="end", colour="#555"),
        f'<path d="M{LEFT} {bottom}{path}L{right:.1f} {bottom}Z" fill="#cfd8dc" stroke="#607d8b"/>',
        f'<path d="M{LEFT} {budget:.1f}H{right:.1f}" stroke="#d1495b" stroke-dasharray="5 4"/>',
        _text(right, budget - 4, f"budget {format_bytes(trace.budget_bytes)}", anchor="end", colour="#d1495b"),
    ]


def _legend(used: set[str], top: float) -> list[str]:
    parts, x = [], LEFT
    for name, (colour, label) in COLOURS.items():
        if name in used:
            parts.append(f'<rect x="{x:g}" y="{top - 9:g}" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(x + 14, top, label))
            x += 26 + 6.4 * len(label)
    return parts


def _ticks(seconds: float) -> list[float]:
    step = 10.0
    while seconds / step < 4:
        step /= 2 if str(step)[0] != "5" else 2.5
    return [step * i for i in range(int(seconds / step) + 1)]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: int = 400, colour: str = "#222"
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    style += f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def plan_of(config: str, memory: str, planner: Any) -> tuple[Plan, Trace]:
    """Return the plan to draw and what it would do."""
    profile = lt_offload.profile_config(
        config, batch_size=4, sequence_length=512, dtype="float32", hardware="rtx-3060-12gb"
    )
    plan = lt_offload.solve(profile, memory=memory, planner=planner)
    return plan, lt_offload.simulate(plan, profile)


def main() -> None:
    """Draw what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=list(PICTURES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only or PICTURES:
        title, *what = PICTURES[name]
        path = options.out / f"{name}.svg"
        path.write_text(draw(*plan_of(*what), title), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
