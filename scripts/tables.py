"""Makes the numbers in README.md and docs/ from results/*.json, and the tables of limits from the package.

    python -m scripts.tables            write the blocks between marks such as <!-- numbers --> and <!-- /numbers -->
    python -m scripts.tables --check    exit with 1 if they are not what the results say

Every table names the script that made its figures, the machine, the date and the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_offload import limits
from scripts.bench.contenders import tables as contender_tables
from scripts.breadth import tables as breadth_tables
from scripts.common import ROOT
from scripts.docs import figures

Result = dict[str, Any]
Rows = list[list[str]]


def bench(results: Sequence[Result]) -> str:
    """What this package and others reach in the same memory, per suite; only what ran on a GPU is shown."""
    parts = []
    for result in results:
        suite = result["settings"]["suite"]
        if result["settings"]["device"] != "cuda":
            continue
        command, lines = f"scripts.bench.suite --suite {suite}", contender_tables.rows(result)
        filled = [at for at, cells in enumerate(zip(*lines, strict=True)) if any(cells)]
        head, *lines = ([row[at] for at in filled] for row in (contender_tables.HEAD, *lines))
        parts.append(_section(contender_tables.TITLES[suite], command, [result], head, lines))
    return "\n\n".join(parts)


_HEADINGS: dict[str, str] = {
    "trainer": "Settings of the Trainer and of the module",
    "hf": "Arguments of transformers' Trainer and of TRL's",
    "accelerate": "Loops with accelerate",
    "model": "Models",
    "optimizer": "Optimizers",
    "run": "What shows only while training runs",
}


def refusals() -> str:
    """Return the table for people: what is refused and what works instead; errors say why, too."""
    parts = []
    for scope, heading in _HEADINGS.items():
        rows = [f"| {row.name} | {row.instead} |" for row in limits.LIMITS if row.scope == scope]
        parts += [f"## {heading}", "", "| not supported | instead |", "|---|---|", *rows, ""]
    return "\n".join(parts).rstrip()


def read(folder: Path) -> dict[str, list[Result]]:
    """Return the result files in ``folder`` by their kind."""
    results: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        results.setdefault(str(result.get("kind")), []).append(result)
    return results


def pages(root: Path) -> dict[Path, str]:
    """Return what the files below ``root`` should hold that have blocks of figures."""
    results, gpu = read(root / "results"), read(root / "results/gpu").get("gpu", [])
    blocks = {
        "README.md": {"numbers": figures.headline(results)},
        "docs/faq.md": {"fp16": breadth_tables.fp16(results.get("fp16", []))},
        "docs/gpu.md": {"bench": bench(results.get("bench", [])), "budgets": figures.budgets(gpu)},
        "docs/limits.md": {
            "limits": refusals(),
            "optimizers": breadth_tables.optimizers(results.get(breadth_tables.NAME, [])),
            "muon": breadth_tables.muon(results.get("muon", [])),
        },
        "docs/models.md": {"breadth": breadth_tables.table(_section, results.get(breadth_tables.NAME, []))},
        "docs/will-it-fit.md": {kind: block(results.get(kind, [])) for kind, block in figures.BLOCKS.items()},
    }
    files = {}
    for name, marked in blocks.items():
        text = (root / name).read_text(encoding="utf-8")
        for mark, block in marked.items():
            text = insert(text, mark, block, name)
        files[root / name] = text
    return files


def insert(text: str, mark: str, block: str, name: str) -> str:
    """Return ``text`` of the file ``name`` with ``block`` between the lines of ``mark``."""
    opening, closing = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, begin, rest = text.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise SystemExit(f"{name} has no lines {opening} and {closing}, in this order")
    return f"{before}{opening}\n\n{block}\n\n{closing}{after}"


def _section(title: str, command: str, results: Sequence[Result], head: list[str], rows: Rows) -> str:
    return f"**{title}** (`python -m {command}`; {figures.origins(results)})\n\n{_table(head, rows)}"


def _table(head: list[str], rows: Rows) -> str:
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md, docs/ and results/")
    options = parser.parse_args()
    files = pages(options.root)
    if options.check:
        stale = [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
        for name in stale:
            print(f"{name} is out of date; run python -m scripts.tables", file=sys.stderr)
        return int(bool(stale))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
