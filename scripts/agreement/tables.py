"""Rows for the tables of docs/benchmarks.md and docs/several-gpus.md from the results of the comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

HEAD = ["tokenizer and template", "TRL", "TRL's packed sequences", "LLaMA-Factory", "the makers' encoders", "not known"]
HEAD_OF_REASONS = ["where they differ", "rows", "why"]
HEAD_OF_PROCESSES = ["case", "processes", "one process that accumulates as many batches", "stock `ddp`"]
_PACKED = "TRL, packed"
_MAKERS = ("mistral-common", "llama-models")

Rows = list[list[str]]


def sections(section: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return tables, made by ``section``: how many rows other packages make the same of, and why not of the others."""
    parts = []
    for result in results:
        title = f"Rows with the same tokens and labels: {packages(result)}"
        parts.append(section(title, "scripts.agreement FILE... --save", [result], HEAD, rows(result)))
        lines = [HEAD_OF_REASONS, ["---", "---:", "---:"], *reasons(result)]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def rows(result: Mapping[str, Any]) -> Rows:
    """Return a line per tokenizer: how many rows of all files are the same, and how many differ for a known reason."""
    found: list[dict[str, Any]] = result["figures"]["comparisons"]
    lines = []
    for tokenizer in dict.fromkeys(each["tokenizer"] for each in found):
        mine = [each for each in found if each["tokenizer"] == tokenizer]
        sides = [
            [each for each in mine if each["against"] == "TRL"],
            [each for each in mine if each["against"].startswith(_PACKED)],
            [each for each in mine if each["against"] == "LLaMA-Factory"],
            [each for each in mine if each["against"] in _MAKERS],
        ]
        unknown = sum(each["undocumented"] for each in mine)
        lines.append([f"`{tokenizer}`", *map(_cell, sides), str(unknown)])
    return lines


def reasons(result: Mapping[str, Any]) -> Rows:
    """Return a line per reason that any row has."""
    counts: Counter[tuple[str, str]] = Counter()
    for each in result["figures"]["comparisons"]:
        for reason, count in each["documented"].items():
            counts["makers' encoders" if each["against"] in _MAKERS else each["against"], reason] += count
    return [
        [escape(f"{side}: {reason}", quote=False), f"{counts[side, reason]:,}", escape(why, quote=False)]
        for side, each in result["figures"]["documented"].items()
        for reason, why in each.items()
        if counts[side, reason]
    ]


def packages(result: Mapping[str, Any]) -> str:
    """Return which versions were compared."""
    return ", ".join(f"{name} {version}" for name, version in result["settings"]["packages"].items())


def processes(section: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table, made by ``section``: several processes beside one, and beside ``ddp``."""
    lines = [of_processes(row) for result in results for row in result["figures"]["rows"]]
    return section("Largest differences from", "scripts.agreement.processes --save", results, HEAD_OF_PROCESSES, lines)


def of_processes(row: Mapping[str, Any]) -> list[str]:
    """Return a line of the table of several processes: equal, or the largest difference, where it was compared."""
    machines = row.get("machines", 1)
    count = f"{row['processes']}{f' on {machines} machines' if machines > 1 else ''}"
    return [row["case"], count, *(_difference(row, other) for other in ("one", "stock"))]


def _difference(row: Mapping[str, Any], other: str) -> str:
    if other not in row:
        return ""
    value = row[other]
    return "not comparable" if value is None else f"{value:.1e}" if value else "equal"


def _cell(compared: Sequence[Mapping[str, Any]]) -> str:
    if not compared:
        return ""
    total, same, unknown = (sum(each[key] for each in compared) for key in ("rows", "same", "undocumented"))
    known = total - same - unknown
    return f"{same:,} of {total:,}" + (f", {known:,} documented" if known else "")
