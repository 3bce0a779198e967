"""Pages, and the figures in them: one self-contained HTML file, whose figures plotly draws when it is opened.

A figure is written as data; ``report.js`` draws it with the colours of the page, light or dark as the reader's system
is, and at the width of a screen, a phone or paper. Plotly's library is in the page once: ``plotly-basic.min.js`` is the
file of that name in the npm package ``plotly.js-basic-dist-min``, which has lines and bars and a quarter of the size.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

OUT_OF_VIEW = 3.0
"""A limit that is so many times higher than a curve is told and not drawn; it would flatten the curve."""
MAX_POINTS = 1500
"""Points of a curve; more are thinned out, keeping the extremes."""
COLORS = tuple(f"var(--series-{number})" for number in range(1, 7))
"""Colours of curves that are side by side."""
_DASHED = {"color": "var(--accent)", "width": 1.4, "dash": "dash"}
"""The line of a limit."""
_FIGURE = '<div class="plot"'
_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a page may do: run its own scripts, which are known by their hashes, and set styles; it can load nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve; a value is None where there is none."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: str = COLORS[0]
    faint: bool = False
    """Whether it is in the background."""
    points: bool = False
    """Whether each point is marked."""
    dash: str = "solid"

    @classmethod
    def through(cls, curve: Sequence[tuple[float, float]], name: str, *, smooth: bool = False, **style: Any) -> Line:
        """Return the line through ``curve``, or through its running means; ``style`` are the other fields."""
        ys = [y for _, y in curve]
        return cls(name=name, xs=[x for x, _ in curve], ys=smoothed(ys) if smooth else ys, **style)


@dataclass(slots=True)
class Drawing:
    """A figure as plotly's library takes it; colours may be variables of the style sheet."""

    traces: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """Return the figure as plotly's JSON; a number that is none, such as a loss that is not finite, is left out."""
        # JSON has no NaN and no infinity: a browser would refuse all of it.
        layout = self.layout | {"shapes": self.shapes, "annotations": self.notes}
        return json.dumps(_finite({"data": self.traces, "layout": layout}), separators=(",", ":"), ensure_ascii=False)

    def level(self, height: float, name: str, *, yref: str = "y") -> None:
        """Draw a dashed line at ``height`` of an axis, with its name above its right end."""
        self.shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "yref": yref,
                "y0": height,
                "y1": height,
                "line": _DASHED,
            }
        )
        place = {"xref": "paper", "x": 1, "xanchor": "right", "yref": yref, "y": height, "yanchor": "bottom"}
        self.say(name, place, size=11, color="var(--accent)")

    def say(self, text: str, place: dict[str, Any], *, size: int = 12, color: str = "var(--soft)") -> None:
        """Write ``text``, which may have a little HTML, at ``place``."""
        font = {"size": size, "color": color}
        self.notes.append({"text": text, **place, "showarrow": False, "font": font, "borderpad": 0})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def page(title: str, body: Iterable[str]) -> str:
    """Return a page that needs nothing from outside. ``title`` is text, ``body`` is HTML."""
    content = "\n".join(part for part in body if part)
    style = _file("report.css")
    # A page without a figure needs no script, and then may run none.
    scripts, allowed = "", "'none'"
    if _FIGURE in content:
        library, own = _file("plotly-basic.min.js"), _file("report.js")
        scripts = f'<script id="plotly">{library}</script>\n<script>{own}</script>\n'
        allowed = f"{_hash(library)} {_hash(own)}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(scripts=allowed)}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n<main>\n"
        f"{content}\n</main>\n{scripts}</body></html>\n"
    )


def unbroken(text: str) -> str:
    """Return ``text`` with numbers that stay on one line with their units."""
    return re.sub(r"(\d) ([kMGT]?B|min|[mu]?s)\b", "\\1\N{NO-BREAK SPACE}\\2", text)


def frame(drawn: Drawing, *, caption: str, label: str, height: int, kind: str = "chart", below: str = "") -> str:
    """Return ``drawn`` as a figure of a page.

    Args:
        drawn: the figure.
        caption: HTML above it.
        label: what it shows, in words, for those who cannot see it.
        height: in pixels.
        kind: CSS class of the figure; figures of one kind that is not ``chart`` are zoomed together.
        below: HTML below it, such as the same as a table.
    """
    data = drawn.json().replace("<", "\\u003c")  # "</script>" ends it, "<!--<script>" would hide its end
    return (
        f'<figure class="{kind}"><figcaption>{caption}</figcaption>'
        f'{_FIGURE} role="img" aria-label="{escape(label)}" style="height:{height}px">'
        "<noscript>Figures are drawn by a script; the same numbers are in the tables.</noscript></div>"
        f'<script type="application/json">{data}</script>{below}</figure>'
    )


def layout(**changes: Any) -> dict[str, Any]:
    """Return what all figures look like, with ``changes``."""
    return {
        "template": None,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "Inter, system-ui, sans-serif", "size": 12, "color": "var(--soft)"},
        "margin": {"l": 4, "r": 8, "t": 6, "b": 26},
        "showlegend": False,
        "hoverlabel": {"bgcolor": "var(--page)", "bordercolor": "var(--faint)", "font": {"color": "var(--ink)"}},
        "colorway": list(COLORS),
    } | changes


def axis(**changes: Any) -> dict[str, Any]:
    """Return what all axes look like, with ``changes``."""
    return {
        "gridcolor": "var(--rule)",
        "linecolor": "var(--faint)",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": 11},
        "ticklabeloverflow": "hide past div",
    } | changes


def lines(
    title: str,
    curves: Sequence[Line],
    *,
    x_title: str = "step",
    y_title: str = "",
    limit: tuple[float, str] | None = None,
    from_zero: bool = True,
    hatched_to: float | None = None,
    x_ticks: Sequence[tuple[float, str]] = (),
    suffix: str = "",
    log_x: bool = False,
    height: int = 250,
    below: str = "",
) -> str:
    """Return curves over a common axis as a figure, nothing if there is no point.

    Args:
        title: what it shows.
        curves: the curves.
        x_title: what the axis is.
        y_title: added to the caption, e.g. the unit.
        limit: a level to compare with, and its name.
        from_zero: whether the vertical axis begins at zero.
        hatched_to: up to where nothing works.
        x_ticks: places and texts of ticks; none: round numbers.
        suffix: unit after the numbers of the vertical axis, with its space.
        log_x: whether the horizontal axis is logarithmic.
        height: in pixels.
        below: HTML below it.
    """
    # A loss that is not finite would leave no axis to draw the others on.
    known = [y for curve in curves for y in curve.ys if y is not None and math.isfinite(y)]
    if not known:
        return ""
    drawn = Drawing(traces=[_trace(curve, suffix) for curve in curves])
    top = max(known)
    # A limit far above the curves would press them to the ground.
    if limit is not None and limit[0] <= OUT_OF_VIEW * top:
        top = max(top, limit[0])
        drawn.traces.append(_limit(*limit, curves))
    x_axis = _horizontal(x_title, x_ticks, log=log_x)
    if hatched_to is not None:
        left, right = curves[0].xs[0], curves[0].xs[-1]
        margin = 0.03 * (right - left)
        x_axis["range"] = [left - margin, max(right, hatched_to) + margin]
        drawn.shapes.append(_hatched(left - margin, hatched_to))
    # Letters for thousands only where numbers would be long.
    y_axis = axis(tickformat="~s" if top >= 10000 else "~g", nticks=5, ticksuffix=suffix)
    if from_zero:
        y_axis["range"] = [0, top * 1.06 or 1]
    many = len(drawn.traces) > 1
    drawn.layout = layout(
        hovermode="x unified" if many else "closest",
        xaxis=x_axis,
        yaxis=y_axis,
        showlegend=many,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
    )
    unit = f" <small>{escape(y_title)}</small>" if y_title else ""
    return frame(
        drawn, caption=escape(title) + unit, label=_in_words(title, curves, suffix), height=height, below=below
    )


def _trace(curve: Line, suffix: str) -> dict[str, Any]:
    """Return ``curve`` as plotly has it, with ``suffix`` after what is shown of a point."""
    xs, ys = thinned(curve)
    return {
        "type": "scatter",
        "x": xs,
        "y": ys,
        "name": curve.name,
        "mode": "lines+markers" if curve.points or len(xs) <= 1 else "lines",
        "line": {"color": curve.color, "width": 1 if curve.faint else 2, "dash": curve.dash},
        "marker": {"size": 6},
        "opacity": 0.5 if curve.faint else 1.0,
        "hovertemplate": f"%{{y:.5~g}}{suffix}<extra>{escape(curve.name)}</extra>",
    }


def _limit(height: float, name: str, curves: Sequence[Line]) -> dict[str, Any]:
    """Return a dashed line at ``height`` as long as ``curves``; a curve and no shape, so that the legend has it."""
    ends = [min(curve.xs[0] for curve in curves if curve.xs), max(curve.xs[-1] for curve in curves if curve.xs)]
    return {
        "type": "scatter", "x": ends, "y": [height] * 2, "name": name, "mode": "lines", "line": _DASHED,
        "hoverinfo": "skip",
    }  # fmt: skip


def _horizontal(title: str, ticks: Sequence[tuple[float, str]], *, log: bool) -> dict[str, Any]:
    """Return the horizontal axis."""
    found = axis(showgrid=False, showline=True, nticks=7, title={"text": title, "font": {"size": 11}, "standoff": 4})
    if log:
        found["type"] = "log"
    if ticks:
        found |= {"tickvals": [x for x, _ in ticks], "ticktext": [text for _, text in ticks]}
    return found


def _hatched(left: float, right: float) -> dict[str, Any]:
    """Return a shade over the whole height between two places of the horizontal axis."""
    return {
        "type": "rect", "x0": left, "x1": right, "yref": "paper", "y0": 0, "y1": 1,
        "fillcolor": "var(--rule)", "opacity": 0.6, "line": {"width": 0}, "layer": "below",
    }  # fmt: skip


def thinned(curve: Line) -> tuple[list[float], list[float | None]]:
    """Return the points of ``curve``, of many the lowest and the highest of each stretch."""
    count = len(curve.xs)
    kept = list(range(count))
    if count > MAX_POINTS:
        kept = []
        size = -(-2 * count // MAX_POINTS)
        for start in range(0, count, size):
            stretch = [i for i in range(start, min(start + size, count)) if curve.ys[i] is not None]
            if stretch:
                kept += sorted({min(stretch, key=_value(curve)), max(stretch, key=_value(curve))})
    return [curve.xs[i] for i in kept], [curve.ys[i] for i in kept]


def _value(curve: Line) -> Any:
    return lambda index: curve.ys[index]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return running means of ``values``, each counting mostly the fortieth part of them that came before it."""
    weight = min(0.98, 1 - 1 / max(4.0, len(values) / 40))
    total = share = 0.0
    found = []
    for value in values:
        # ``share`` is what the weights so far add up to: without it the first means would be too near to zero.
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        found.append(total / share)
    return found


def _in_words(title: str, curves: Sequence[Line], suffix: str) -> str:
    """Return where each curve begins and ends."""
    told = []
    for curve in curves:
        known = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if y is not None]
        if known and not curve.faint:
            (x0, y0), (x1, y1) = known[0], known[-1]
            told.append(f"{curve.name} {y0:.4g}{suffix} at {x0:g}, {y1:.4g}{suffix} at {x1:g}")
    return f"{title}: {'; '.join(told)}"


def _hash(script: str) -> str:
    """Return what a policy knows ``script`` by."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return files("lt_offload.report").joinpath(name).read_text(encoding="utf-8")
