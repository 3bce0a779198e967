"""The papers' tables, beside what this package's planners and simulator say.

    python -m scripts.papers                    all: results/papers.json and results/papers.md
    python -m scripts.papers offmate-table-2    only the sections whose key begins so, printed and not stored

Nothing here was measured on a GPU: "ours" is always simulated, from the inputs that each section lists.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from scripts.common import arguments, read_json, save
from scripts.docs.figures import origins
from scripts.papers import offmate, weights
from scripts.papers.rows import Row, Section

MODULES = (offmate, weights)


def main() -> int:
    """Compute, print and store."""
    parser = arguments(__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of the keys of the sections to show")
    options = parser.parse_args()
    found: list[Section] = []
    seconds: dict[str, float] = {}
    for module in MODULES:
        began, name = time.perf_counter(), module.__name__.rpartition(".")[2]
        for section in module.sections():
            if not options.keys or section.key.startswith(tuple(options.keys)):
                found.append(section)
                print(markdown(section), flush=True)
        seconds[name] = time.perf_counter() - began
        print(f"{name}: {seconds[name]:.0f} s", file=sys.stderr, flush=True)
    if options.keys:
        if not found:
            parser.error(f"no section's key begins with {' or '.join(options.keys)}")
        return 0
    figures = {"sections": [_as_json(section) for section in found], "seconds": seconds}
    result = read_json(save("papers", "papers", {"simulated": True}, figures, options.results))
    path = options.results / "papers.md"
    path.write_text(page(found, result), encoding="utf-8")
    print(path)
    return 0


def page(sections: Iterable[Section], result: dict[str, Any]) -> str:
    """Return all sections as one Markdown page."""
    head = (
        "# The papers' tables, reproduced\n\n"
        "Made by `make papers`. Every figure under *ours* is **simulated** by this package's planners; nothing was\n"
        "measured on a GPU. The ratio is ours over published: below 1 where a time is shorter than the paper's, above\n"
        "1 where a throughput is higher. Published times were measured, with all that a model leaves out.\n\n"
        f"Computed on {origins([result])}.\n\n"
    )
    return head + "\n".join(markdown(section) for section in sections)


def markdown(section: Section) -> str:
    """Return one section as Markdown."""
    lines = [f"## {section.title}", "", f"{section.source}. Key: `{section.key}`.", "", *_table(section.rows), ""]
    for title, items in (("Inputs", section.inputs), ("Assumed", section.assumed), ("Missing", section.missing)):
        if items:
            lines += [f"{title}:", "", *(f"- {item}" for item in items), ""]
    return "\n".join(lines) + "\n"


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| | published | ours, simulated | ratio | |"
    yield "|---|--:|--:|--:|---|"
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        unit = f" {row.unit}" if row.unit else ""
        yield f"| {row.label} | {_figure(row.published, unit)} | {_figure(row.ours, unit)} | {ratio} | {row.note} |"


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.4g}{unit}" if abs(value) < 1e4 else f"{value:,.0f}{unit}"


def _as_json(section: Section) -> dict[str, Any]:
    found = asdict(section)
    found["rows"] = [{**asdict(row), "ratio": row.ratio} for row in section.rows]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
