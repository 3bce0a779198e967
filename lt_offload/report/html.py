"""The page around a report and the tables in it, as HTML. Knows neither plans nor what the cells mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

NONE = "–"
"""In a cell: there is nothing of this."""
_SCRIPT = """for (const figure of document.querySelectorAll("figure"))
  for (const event of ["pointerover", "click"])
    figure.addEventListener(event, ({target}) => {
      const title = target.tagName === "rect" && target.firstElementChild;
      if (title) figure.querySelector(".readout").textContent = title.textContent;
    });"""
"""Shows a bar's title below its drawing, for fingers; without scripts the browser's own tooltip remains."""


def page(title: str, body: Iterable[str]) -> str:
    """Return a page that needs nothing from outside. ``title`` is text, ``body`` is HTML."""
    style = files("lt_offload.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def unbroken(text: str) -> str:
    """Return ``text`` with numbers that stay on one line with their units."""
    return re.sub(r"(\d) ([kMGT]?B|min|[mu]?s)\b", "\\1\N{NO-BREAK SPACE}\\2", text)


def section(title: str, note: str, *content: str) -> str:
    """Return a heading, what is to be known about the content, and the content."""
    about = f'<p class="note">{note}</p>' if note else ""
    return f"<h2>{title}</h2>{about}{''.join(content)}"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    marked: int | None = None,
    label: str,
) -> str:
    """Return a table of cells that are HTML already.

    Args:
        head: one heading per column.
        rows: the first cell of each is its heading.
        numeric: the columns set flush right.
        marked: the row that stands out.
        label: what the table is, for those who cannot see it.
    """
    right = set(numeric)

    def cell(tag: str, column: int, content: str, attribute: str) -> str:
        kinds = ["n"] * (column in right) + ["none"] * (content in ("", NONE))
        shown = f"<span>{content}</span>" if tag == "td" else content
        return f'<{tag} class="{" ".join(kinds)}" {attribute}>{shown}</{tag}>'.replace(' class=""', "")

    def line(at: int, row: Sequence[str]) -> str:
        # On a phone a row becomes a list, for which every cell knows its heading.
        first, *rest = row
        cells = [cell("td", i, c, f'data-head="{head[i]}"') for i, c in enumerate(rest, start=1)]
        mark = ' class="marked"' if at == marked else ""
        return f"<tr{mark}>" + cell("th", 0, first, 'scope="row"') + "".join(cells) + "</tr>"

    heading = "".join(cell("th", i, c, 'scope="col"') for i, c in enumerate(head))
    body = "".join(line(at, row) for at, row in enumerate(rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table></div>"
    )
