"""The page of a sweep: curves over memory, or bars for machines, and the table. Knows sweeps."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from lt_offload.plan.sweep import Sweep, SweepPoint, format_rate, headline, name_of
from lt_offload.report.html import NONE, page, section, table, unbroken
from lt_offload.report.plot import Line, bars, chart
from lt_offload.units import format_bytes, format_seconds

_TITLES = {"memory": "how much GPU memory?", "host_memory": "how much RAM?", "hardware": "which card?"}
_OF = {"memory": "GPU memory", "host_memory": "RAM allowed", "hardware": "machine"}


def sweep_page(sweep: Sweep) -> str:
    """Return the page of ``sweep``."""
    title = f"{sweep.model}: {_TITLES[sweep.axis]}"
    batches = sorted({point.batch_size for point in sweep.points if point.batch_size is not None})
    machines = {point.hardware for point in sweep.points} if sweep.axis != "hardware" else set()
    batch = " or ".join(map(str, batches)) or "?"
    about = ", ".join([f"{batch} × {sweep.sequence_length} tokens", sweep.dtype, *sorted(machines)])
    return page(
        title,
        [
            f"<header><h1>{escape(title)}</h1><p>sweep · {escape(about)}</p></header>",
            f'<p class="lead">{unbroken(escape(headline(sweep)))} Every point is a plan, checked and simulated.</p>',
            _machines(sweep) if sweep.axis == "hardware" else _curves(sweep),
            _table(sweep),
            "<footer>Made by lt_offload.</footer>",
        ],
    )


def _curves(sweep: Sweep) -> str:
    points = sweep.points
    at = [float(p.memory_bytes if sweep.axis == "memory" else p.host_memory_bytes) for p in points]
    least = None
    if points[0].iteration_s is None:
        first = next((x for x, point in zip(at, points, strict=True) if point.iteration_s is not None), at[-1])
        least = float(sweep.smallest_bytes or first) if sweep.axis == "memory" else first
    large = max(at) >= 1e9

    def x_text(x: float) -> str:
        return f"{x / 1e9:.4g} GB" if large else format_bytes(x)

    def draw(name: str, y_text: Callable[[float], str], *lines: Line) -> str:
        return chart(name, at, lines, x_text=x_text, y_text=y_text, nothing_below=least)

    charts = [
        draw("Tokens per second", format_rate, Line(name="tokens", values=[p.tokens_per_s for p in points], main=True)),
        draw(
            "Time of an iteration",
            format_seconds,
            Line(name="lower bound", values=[p.lower_bound_s for p in points]),
            Line(name="iteration", values=[p.iteration_s for p in points], main=True),
        ),
        draw("RAM needed", _gb, Line(name="RAM", values=[_float(p.host_peak_bytes) for p in points], main=True)),
    ]
    note = f"Over {_OF[sweep.axis]}; hatched: no plan fits." if least else f"Over {_OF[sweep.axis]}."
    return section("Curves", note, f'<div class="charts">{"".join(charts)}</div>')


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _gb(value: float) -> str:
    return format_bytes(value) if value else "0"


def _machines(sweep: Sweep) -> str:
    rates = [point.tokens_per_s for point in sweep.points]
    best = max((rate for rate in rates if rate is not None), default=None)
    rows = [
        (p.hardware, p.tokens_per_s, p.reason if p.tokens_per_s is None else format_rate(p.tokens_per_s))
        for p in sweep.points
    ]
    return section("Tokens per second", "", bars(rows, chosen=None if best is None else rates.index(best)))


def _table(sweep: Sweep) -> str:
    head = (_OF[sweep.axis], "iteration", "tokens/s", "against no offload", "GPU peak", "RAM", "plan")
    return section(
        "Figures",
        "",
        table(head, [_row(point, sweep) for point in sweep.points], numeric=range(1, 6), label="Figures per point"),
    )


def _row(point: SweepPoint, sweep: Sweep) -> list[str]:
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
