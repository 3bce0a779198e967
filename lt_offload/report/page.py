"""HTML pages of text, tables and plotly figures; each page is one file that loads nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from lt_offload.replacing import write_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NONE = "–"
"""Text of a table's empty cell."""
MAX_POINTS = 1500
"""Points of a curve; more are thinned out, keeping the extremes."""
LIMIT = {"color": "#b3392f", "width": 1.4, "dash": "dash"}
"""The line of a budget, or of what was planned."""
_CONFIG = {"displayModeBar": False, "responsive": True}
_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Rights of a page: it runs its own scripts, which are known by their hashes, and sets styles; it can load nothing."""


def write_page(path: Path, title: str, details: str, parts: Iterable[str]) -> Path:
    """Write a page of ``parts`` in HTML, and its folder where there is none; return the path."""
    content = "\n".join(part for part in parts if part)
    # Texts of users are escaped, so that all scripts in the content are those of figures.
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", content, re.DOTALL)
    library = ""
    if scripts:
        from plotly.offline import get_plotlyjs

        scripts.append(get_plotlyjs())
        library = f'<script id="plotly">{scripts[-1]}</script>'
    hashes = (f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = _POLICY.format(scripts=" ".join(hashes) or "'none'")
    style = files("lt_offload.report").joinpath("report.css").read_text(encoding="utf-8")
    return write_text(
        path,
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{style}</style>{library}</head>\n<body>\n"
        f"<h1>{escape(title)}</h1><p>{escape(details)}</p>\n{content}\n<footer>Made by lt_offload.</footer>\n"
        "</body></html>\n",
    )


def section(title: str, note: str, *content: str) -> str:
    """Return a heading, a text about the content, and the content; nothing if there is no content."""
    about = f"<p>{escape(note)}</p>" if note else ""
    return f"<h2>{escape(title)}</h2>{about}{''.join(content)}" if any(content) else ""


def drawn(figure: Figure, name: str, label: str) -> str:
    """Return ``figure``, whose height is set, as HTML.

    ``name`` is unique in the page; ``label`` says in words what it shows, for those who cannot see it.
    """
    # Below, where a phone has as many lines of it as it needs.
    legend = {"orientation": "h", "xref": "container", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom"}
    figure.update_layout(template="plotly_white", margin={"l": 8, "r": 8, "t": 28, "b": 24}, legend=legend)
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    html = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=_CONFIG)
    return f'<figure role="img" aria-label="{escape(label)}">{html}</figure>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, nothing without rows; the first cell of a row is its heading."""
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    ]
    if not lines:
        return ""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    above = f"<thead><tr>{heads}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table>{above}<tbody>{"".join(lines)}</tbody></table></div>'


def thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of ``curve``, of many the lowest and the highest of each stretch."""
    size = -(-2 * len(curve) // MAX_POINTS) if len(curve) > MAX_POINTS else 1
    points: list[tuple[float, float]] = []
    for start in range(0, len(curve), size):
        stretch = sorted(curve[start : start + size], key=lambda point: point[1])
        points += sorted({stretch[0], stretch[-1]})
    return points
