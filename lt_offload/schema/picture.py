"""A plan as a small picture in HTML, for the end of a notebook's cell. It needs neither script nor file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from lt_offload.schema.explain import brief
from lt_offload.schema.lanes import shown
from lt_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lt_offload.schema.plan import Plan

_LABEL, _BAR, _ROW = 170, 320, 22
"""Pixels: start of the bars, length of a full one, height of a row."""
_COLORS = {"time": "#4c78a8", "memory": "#f58518"}


def picture(plan: Plan) -> str:
    """Return ``plan`` in words, with bars for the load of each lane and the use of each memory."""
    rows = list(_rows(plan))
    drawn = "".join(_row(number, *row) for number, row in enumerate(rows))
    # Bars say nothing to a screen reader.
    label = "; ".join(f"{name}: {what}" for name, what, _, _ in rows)
    return (
        f'<pre style="white-space:pre-wrap">{escape(brief(plan))}</pre>'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {_ROW * len(rows) + 4}" width="100%" '
        f'style="max-width:760px" role="img" aria-label="{escape(label)}" font-family="sans-serif" font-size="12" '
        f'fill="currentColor">{drawn}</svg>'
    )


def _rows(plan: Plan) -> Iterator[tuple[str, str, float, str]]:
    """Yield name, figures, share and kind of each bar."""
    predicted = plan.predicted
    busy: dict[str, float] = {}
    for op, count in zip(plan.ops, plan.counts, strict=True):
        busy[op.lane] = busy.get(op.lane, 0.0) + count * op.seconds
    for lane in shown(busy):
        seconds = busy.get(lane.name, 0.0)
        share = seconds / predicted.iteration_s if predicted.iteration_s else 0.0
        yield lane.title, f"{format_seconds(seconds)} of {format_seconds(predicted.iteration_s)}", share, "time"
    for name, used, budget in (
        ("device memory", predicted.device_peak_bytes, plan.budget_bytes),
        ("RAM", predicted.host_peak_bytes, plan.host_budget_bytes),
    ):
        yield name, f"{format_bytes(used)} of {format_bytes(budget)}", used / budget if budget else 0.0, "memory"


def _row(number: int, name: str, what: str, share: float, kind: str) -> str:
    top, width = number * _ROW + 4, _BAR * min(share, 1.0)
    return (
        f'<text x="0" y="{top + 12}">{escape(name)}</text>'
        f'<rect x="{_LABEL}" y="{top}" width="{_BAR}" height="{_ROW - 8}" fill="currentColor" opacity="0.12"/>'
        f'<rect x="{_LABEL}" y="{top}" width="{width:.0f}" height="{_ROW - 8}" fill="{_COLORS[kind]}"/>'
        f'<text x="{_LABEL + _BAR + 8}" y="{top + 12}">{escape(what)}</text>'
    )
