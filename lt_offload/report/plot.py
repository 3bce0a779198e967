"""Draws curves over sizes as HTML with inline SVG. Knows numbers and how to write them, not what they mean.

As in the drawing of an iteration, the SVG is stretched and all text is HTML beside it, placed in percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_HEIGHT = 100
_WIDTH = 1000
_MARGIN = 0.03
"""Of the width, left and right of the first and last point."""
_LABEL = 11
"""Percent of the width that the label of a point takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve; ``values`` are those of the chart's points, None where there is none."""

    name: str
    values: Sequence[float | None]
    main: bool = False
    """Whether its points are marked."""


def chart(
    title: str,
    at: Sequence[float],
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
        at: where the points are, ascending.
        lines: the curves.
        x_text: how a place is written.
        y_text: how a value is written.
        chosen: the point that stands out.
        nothing_below: where it begins to work, if some points are below.
    """
    known = [value for line in lines for value in line.values if value is not None]
    ticks = round_ticks(max(known, default=1.0))
    top = max(1.04 * max(known, default=1.0), ticks[-1])
    span = at[-1] - at[0] or 1.0

    def left(x: float) -> float:
        return 100 * (_MARGIN + (1 - 2 * _MARGIN) * (x - at[0]) / span)

    grid = "".join(f'<p style="bottom:{100 * y / top:.2f}%"><span>{escape(y_text(y))}</span></p>' for y in ticks)
    curves = "".join(_curve(line, [left(x) / 100 for x in at], top) for line in lines)
    dots = "".join(
        f'<i class="dot{" chosen" if i == chosen else ""}" style="left:{left(at[i]):.2f}%;bottom:{100 * y / top:.2f}%" '
        f'title="{escape(f"{x_text(at[i])}: {y_text(y)}")}"></i>'
        for line in lines
        if line.main
        for i, y in enumerate(line.values)
        if y is not None
    )
    void = ""
    if nothing_below is not None and nothing_below > at[0]:
        width = min(left(nothing_below), 100.0)
        void = f'<div class="void" style="width:{width:.2f}%" title="does not fit below {x_text(nothing_below)}"></div>'
    labels, free = "", 0.0
    for x in at:
        if left(x) >= free:
            labels += f'<span style="left:{left(x):.2f}%">{escape(x_text(x))}</span>'
            free = left(x) + _LABEL
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{_key(lines)}</figcaption>'
        f'<div class="field">{void}{grid}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_summary(title, at, lines, x_text, y_text))}">{curves}</svg>{dots}</div>'
        f'<div class="axis">{labels}</div></figure>'
    )


def _curve(line: Line, places: Sequence[float], top: float) -> str:
    path, pen = "", "M"
    for place, value in zip(places, line.values, strict=True):
        if value is None:
            pen = "M"
            continue
        path += f"{pen}{_WIDTH * place:.1f} {_HEIGHT * (1 - value / top):.2f}"
        pen = "L"
    return f'<path class="{"line" if line.main else "line other"}" d="{path}"/>' if path else ""


def _key(lines: Sequence[Line]) -> str:
    others = [line.name for line in lines if not line.main]
    return f' <small><i class="dash"></i>{escape(", ".join(others))}</small>' if others else ""


def _summary(
    title: str,
    at: Sequence[float],
    lines: Sequence[Line],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """Return the curve in words, for those who cannot see it."""
    [values] = [line.values for line in lines if line.main]
    return f"{title}: " + ", ".join(
        f"{y_text(y) if y is not None else 'nothing'} at {x_text(x)}" for x, y in zip(at, values, strict=True)
    )


def round_ticks(limit: float) -> list[float]:
    """Return zero and round values up to about ``limit``, three to five of them."""
    if limit <= 0:
        return [0.0, 1.0]
    raw = limit / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * i for i in range(int(limit / step * 1.001) + 1)]


def bars(rows: Sequence[tuple[str, float | None, str]], *, chosen: int | None = None) -> str:
    """Return horizontal bars: name, length, and what is written beside it. Without a length there is only the text."""
    longest = max((length for _, length, _ in rows if length is not None), default=0.0) or 1.0

    def row(at: int, name: str, length: float | None, text: str) -> str:
        bar = "" if length is None else f'<i style="width:calc((100% - 5.5em) * {length / longest:.4f})"></i>'
        mark = ' class="chosen"' if at == chosen else ""
        return f"<dt>{escape(name)}</dt><dd{mark}>{bar}<span>{escape(text)}</span></dd>"

    return f'<dl class="times">{"".join(row(at, *values) for at, values in enumerate(rows))}</dl>'
