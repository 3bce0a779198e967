"""Rows for the tables of docs/gpu.md, and the curve over memory, from the result files of the suites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from lt_offload.units import format_bytes, format_seconds
from scripts.bench.contenders import CONTENDERS

Row = dict[str, Any]

TITLES = {
    "small": "The same step in the same memory",
    "papers": "Models that do not fit, in the memory of a small card",
    "curve": "Throughput against memory",
    "batches": "The same copies beside more and less to compute",
}
HEAD = [
    "model, budget",
    "trained by",
    "tokens/s",
    "step",
    "of no offload",
    "of the best other",
    "predicted step",
    "bound",
    "device peak",
    "RAM",
    "losses",
]
COLOURS = ("#0b6e4f", "#c1443c", "#3566a8", "#b7791f", "#7a4ea3", "#555555")


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a line per measured row; what failed says why."""
    found: list[Row] = result["figures"]["rows"]
    order = {name: place for place, name in enumerate(CONTENDERS)}
    models = {model: place for place, model in enumerate(dict.fromkeys(row["model"] for row in found))}
    ordered = sorted(
        found, key=lambda row: (models[row["model"]], row["budget_bytes"] or 0, order.get(row["contender"], len(order)))
    )
    return [_line(row, found) for row in ordered]


def _line(row: Row, found: Sequence[Row]) -> list[str]:
    budget = row["budget_bytes"]
    head = [f"{row['model']}, {format_bytes(budget) if budget else 'all memory'}", row["title"]]
    if row["status"] != "ok":
        return [*head, row["status"], *[""] * (len(HEAD) - len(head) - 1)]
    plan = row.get("plan") or {}
    return [
        *head,
        f"{row['tokens_per_s']:.0f}{' (extrapolated)' if row.get('extrapolated') else ''}",
        format_seconds(row["step_s"]),
        _ratio(row, no_offload(row, found)),
        _ratio(row, best_other(row, found)) if is_ours(row) else "",
        format_seconds(plan["predicted_s"]) if plan else "",
        format_seconds(plan["lower_bound_s"]) if plan else "",
        _device(row),
        format_bytes(row["host_peak_bytes"]) if "host_peak_bytes" in row else "",
        _losses(row),
    ]


def is_ours(row: Row) -> bool:
    """Return whether this package trained it."""
    contender = CONTENDERS.get(row["contender"])
    return contender is not None and contender.ours


def no_offload(row: Row, found: Sequence[Row]) -> Row | None:
    """Return the run of the same model that had all memory, if it was measured."""
    same = (r for r in found if r["model"] == row["model"] and r["contender"] == "no-offload" and r["status"] == "ok")
    return next(same, None)


def best_other(row: Row, found: Sequence[Row]) -> Row | None:
    """Return the fastest run of another system with the same model and budget, if any ran."""
    others = (
        r
        for r in found
        if (r["model"], r["budget_bytes"]) == (row["model"], row["budget_bytes"])
        and r["status"] == "ok"
        and not is_ours(r)
    )
    return max(others, key=lambda r: float(r["tokens_per_s"]), default=None)


def _ratio(row: Row, other: Row | None) -> str:
    return "" if other is None else f"{row['tokens_per_s'] / other['tokens_per_s']:.2f}"


def _device(row: Row) -> str:
    peak = row.get("device_peak_bytes")
    if peak is None:
        return ""
    return format_bytes(peak) + ("" if row.get("within_budget", True) else " (over the budget)")


def _losses(row: Row) -> str:
    if row.get("losses_equal"):
        return "equal"
    difference = row.get("loss_difference")
    return "" if difference is None else f"Δ {difference:.1e}"


class _Point(NamedTuple):
    x: float
    """Gigabytes of the budget."""
    y: float
    """Tokens per second."""
    within: bool
    """Whether the run kept to the budget."""


def curve(result: Mapping[str, Any]) -> str:
    """Return throughput over memory as an SVG file: a line per contender, a dashed one without offload.

    Points of runs that took more than their budget are hollow.
    """
    found = [row for row in result["figures"]["rows"] if row["status"] == "ok"]
    lines: dict[str, list[_Point]] = {}
    order = {name: place for place, name in enumerate(CONTENDERS)}
    for row in sorted(found, key=lambda row: (order.get(row["contender"], len(order)), row["budget_bytes"] or 0)):
        if row["budget_bytes"]:
            point = _Point(row["budget_bytes"] / 1e9, row["tokens_per_s"], row.get("within_budget", True))
            lines.setdefault(row["title"], []).append(point)
    ceiling = max((row["tokens_per_s"] for row in found if not row["budget_bytes"]), default=None)
    return _drawn(lines, ceiling, result["figures"]["rows"][0]["model"])


def _drawn(lines: Mapping[str, Sequence[_Point]], ceiling: float | None, title: str) -> str:
    width, height, left, right, top, bottom = 880, 380, 70, 310, 34, 44
    points = [point for line in lines.values() for point in line]
    most_x = max((point.x for point in points), default=1.0)
    ticks = _ticks(max([point.y for point in points] + ([ceiling] if ceiling else []), default=1.0))
    most_y = max([ticks[-1], *(point.y for point in points), ceiling or 0.0]) * 1.03

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * x / most_x,
            height - bottom - (height - top - bottom) * y / most_y,
        )

    end = width - right
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-size="14">{escape(title)}: tokens/s against device memory</text>',
    ]
    for tick in ticks:
        y = place(0, tick)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{end}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
    for x in sorted({point.x for point in points}):
        at = place(x, 0)
        parts.append(f'<text x="{at[0]:.1f}" y="{at[1] + 18:.1f}" text-anchor="middle">{x:g} GB</text>')
    if ceiling is not None:
        y = place(0, ceiling)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{end}" stroke="#111111" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{end + 10}" y="{y + 4:.1f}">no offload</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = "L".join("{:.1f} {:.1f}".format(*place(point.x, point.y)) for point in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{3 if index == 0 else 1.8}"/>')
        for point in line:
            x, y = place(point.x, point.y)
            over = "" if point.within else ", over the budget"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour if point.within else "#ffffff"}" '
                f'stroke="{colour}"><title>{point.y:.0f}{over}</title></circle>'
            )
        key = height - bottom - 18 * (len(lines) - index)
        parts.append(f'<rect x="{end + 12}" y="{key - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{end + 28}" y="{key}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(limit: float) -> list[float]:
    """Return zero and round values up to about ``limit``, three to five of them."""
    raw = limit / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * i for i in range(int(limit / step * 1.001) + 1)]
