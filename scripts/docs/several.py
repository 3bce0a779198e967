"""Several processes in docs/gpu.md: their numbers compared, and what cards and machines buy, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lt_offload.units import format_bytes, format_rate, format_seconds
from scripts.docs.figures import origins

Result = Mapping[str, Any]
Section = Callable[..., str]

MOST_MACHINES = 8
"""Machines beyond that are in the results alone."""


def processes(results: Sequence[Result]) -> str:
    """Return how many cases are equal to one process, and to ``ddp``; empty if there are no results."""
    rows = [row for result in results for row in result["figures"]["rows"]]
    if not rows:
        return ""
    alone = [row["one"] for row in rows if "one" in row]
    beside = [(row["processes"], row["stock"]) for row in rows if "stock" in row]
    pairs = [value for count, value in beside if count == 2]
    more = [value for count, value in beside if count > 2]
    largest = max((value for value in more if value is not None), default=0.0)
    return (
        f"{alone.count(0)} of {len(alone)} cases are equal to one process that accumulates as many batches. With two "
        f"processes {pairs.count(0)} of {len(pairs)} are equal to `ddp`; with more, {more.count(0)} of {len(more)}, "
        f"and the largest difference is {largest:.1e} "
        f"(`python -m scripts.agreement.processes --save`; {origins(results)})."
    )


def cards(section: Section, results: Sequence[Result]) -> str:
    """Return a row for each kind of machine and number of cards, made by ``section``; empty if there are no results."""
    rows = [
        [
            result["settings"]["machine"],
            str(row["cards"]),
            format_seconds(row["iteration_s"]),
            format_rate(row["tokens_per_s"]),
            f"{row['times_one']:.2f}",
            row["limit"],
            format_bytes(row["ram_bytes"]),
        ]
        for result in _in_order(results)
        for row in result["figures"]["cards"]
        if row["one_host_copy"]
    ]
    head = ["machine", "cards", "an update", "tokens/s", "times one card", "longest part", "RAM"]
    return _table(section, results, "Cards, simulated", head, rows)


def machines(section: Section, results: Sequence[Result]) -> str:
    """Return a row for each kind of machine and network: how many times one card so many are; empty if no results."""
    rows, counts = [], list[int]()
    for result in _in_order(results):
        found = result["figures"]["machines"]
        for network in dict.fromkeys(row["network"] for row in found):
            mine = [row for row in found if row["network"] == network and row["machines"] <= MOST_MACHINES]
            counts = [row["machines"] for row in mine]
            times = [f"{row['times_one']:.1f}" for row in mine]
            rows.append([result["settings"]["machine"], network, *times])
    head = ["times one card; machines:", "network", *map(str, counts)]
    return _table(section, results, "Machines, simulated", head, rows)


def _in_order(results: Sequence[Result]) -> list[Result]:
    return sorted(results, key=lambda result: int(result["settings"]["number"]))


def _table(section: Section, results: Sequence[Result], title: str, head: list[str], rows: list[list[str]]) -> str:
    return section(title, "scripts.cards", results, head, rows) if rows else ""
