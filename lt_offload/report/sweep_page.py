"""The report of a sweep: one self-contained HTML page with curves over memory, or bars per machine."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lt_offload.plan.sweep import Sweep, SweepPoint, headline, name_of
from lt_offload.report.drawing import Line, lines, page, unbroken
from lt_offload.report.plan_page import header, write
from lt_offload.report.tables import NONE, bar_list, section, table
from lt_offload.units import format_bytes, format_rate, format_seconds

_TITLES = {
    "memory": "how much GPU memory?",
    "host_memory": "how much RAM?",
    "hardware": "which card?",
    "devices": "how many cards?",
    "nodes": "how many machines?",
}
_OF = {
    "memory": "GPU memory",
    "host_memory": "RAM allowed",
    "hardware": "machine",
    "devices": "cards",
    "nodes": "machines",
}


def write_sweep_report(path: str | Path, sweep: Sweep) -> Path:
    """Write the curves and the table of a sweep to ``path`` and return the path."""
    return write(Path(path), _page(sweep))


def _page(sweep: Sweep) -> str:
    title = f"{sweep.model}: {_TITLES[sweep.axis]}"
    batches = sorted({point.batch_size for point in sweep.points if point.batch_size is not None})
    machines = {point.hardware for point in sweep.points} if sweep.axis != "hardware" else set()
    batch = " or ".join(map(str, batches)) or "?"
    about = [f"{batch} × {sweep.sequence_length} tokens", sweep.dtype, *sorted(machines)]
    return page(
        title,
        [
            header(title, "sweep", about),
            f'<p class="lead">{unbroken(escape(headline(sweep)))} Every point is a plan, checked and simulated.</p>',
            _bars(sweep) if sweep.axis in ("hardware", "devices", "nodes") else _curves(sweep),
            _sweep_table(sweep),
            "<footer>Made by lt_offload.</footer>",
        ],
    )


def _curves(sweep: Sweep) -> str:
    points = sweep.points
    sizes = [float(p.memory_bytes if sweep.axis == "memory" else p.host_memory_bytes) for p in points]
    least = None
    # Sizes ascend: where nothing fits, that is at the beginning.
    if points[0].iteration_s is None:
        first = next((x for x, point in zip(sizes, points, strict=True) if point.iteration_s is not None), sizes[-1])
        least = float(sweep.smallest_bytes or first) if sweep.axis == "memory" else first
    unit, scale = ("GB", 1e9) if max(sizes) >= 1e9 else ("MB", 1e6)
    xs = [size / scale for size in sizes]

    def draw(title: str, suffix: str, *curves: tuple[str, list[float | None]]) -> str:
        *others, main = curves
        return lines(
            title,
            [
                *(Line(name=name, xs=xs, ys=ys, color="var(--faint)", dash="dash") for name, ys in others),
                Line(name=main[0], xs=xs, ys=main[1], points=True),
            ],
            x_title=f"{_OF[sweep.axis]}, {unit}",
            suffix=suffix,
            hatched_to=None if least is None else least / scale,
        )

    charts = [
        draw("Tokens per second", "", ("tokens/s", [p.tokens_per_s for p in points])),
        draw(
            "Time of an iteration",
            " s",
            ("lower bound", [p.lower_bound_s for p in points]),
            ("iteration", [p.iteration_s for p in points]),
        ),
        draw("RAM needed", " GB", ("RAM", [None if (n := p.host_peak_bytes) is None else n / 1e9 for p in points])),
    ]
    note = f"Over {_OF[sweep.axis]}; grey: no plan fits." if least else f"Over {_OF[sweep.axis]}."
    return section("Curves", note, f'<div class="charts">{"".join(charts)}</div>')


def _bars(sweep: Sweep) -> str:
    rates = [point.tokens_per_s for point in sweep.points]
    best = max((rate for rate in rates if rate is not None), default=None)
    rows = [
        (name_of(p, sweep.axis), p.tokens_per_s, p.reason if p.tokens_per_s is None else format_rate(p.tokens_per_s))
        for p in sweep.points
    ]
    return section("Tokens per second", "", bar_list(rows, chosen=None if best is None else rates.index(best)))


def _sweep_table(sweep: Sweep) -> str:
    head = (_OF[sweep.axis], "iteration", "tokens/s", "against no offload", "GPU peak", "RAM", "plan")
    return section(
        "Figures",
        "",
        table(
            head, [_sweep_row(point, sweep) for point in sweep.points], numeric=range(1, 6), label="Figures per point"
        ),
    )


def _sweep_row(point: SweepPoint, sweep: Sweep) -> list[str]:
    name = escape(name_of(point, sweep.axis))
    if point.iteration_s is None:
        return [name, *[NONE] * 5, escape(point.reason)]
    return [
        name,
        format_seconds(point.iteration_s),
        format_rate(point.tokens_per_s or 0.0),
        f"{point.iteration_s / point.no_offload_s:.2f}×" if point.no_offload_s else NONE,
        format_bytes(point.device_peak_bytes or 0),
        format_bytes(point.host_peak_bytes or 0),
        escape(point.planner or ""),
    ]
