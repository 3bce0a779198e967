"""Tables for docs/several-gpus.md: what cards and machines buy, simulated; two processes with slow links, measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lt_offload.units import format_bytes, format_rate, format_seconds

Result = Mapping[str, Any]
Section = Callable[..., str]

HEAD_OF_CARDS = [
    "machine",
    "cards",
    "a copy in each process",
    "one host copy: an update",
    "no plan is faster than",
    "if updates wait",
    "tokens/s",
    "times one card",
    "what takes longest",
    "batches",
    "RAM, a copy each",
    "RAM, one copy",
]
_NETWORK = "copies between machines"
HEAD_OF_LINKS = ["processes", "a step", "copies in alone", "copies out alone", "tokens/s", "times one", "goal"]


def blocks(section: Section, results: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """Return the blocks of the page by their marks, each made by ``section``."""
    found = results.get("bench-cards", ())
    return {
        "cards": cards(section, found),
        "machines": machines(section, found),
        "links": links(section, results.get("bench-links", ())),
    }


def cards(section: Section, results: Sequence[Result]) -> str:
    """Return the rows of all kinds of machines, made by ``section``; empty if there are no results."""
    rows = []
    for result in _in_order(results):
        found = result["figures"]["cards"]
        for count in dict.fromkeys(row["cards"] for row in found):
            ways = {row["one_host_copy"]: row for row in found if row["cards"] == count}
            rows.append([result["settings"]["machine"], str(count), *_of_cards(ways)])
    return _table(section, results, "Cards, simulated", HEAD_OF_CARDS, rows)


def _of_cards(ways: Mapping[bool, Mapping[str, Any]]) -> list[str]:
    own, common = ways.get(False, {}), ways[True]
    return [
        format_seconds(own["iteration_s"]) if "iteration_s" in own else "",
        format_seconds(common["iteration_s"]),
        format_seconds(common["least_s"]),
        format_seconds(common["waits_s"]) if common["waits_s"] else "",
        format_rate(common["tokens_per_s"]),
        f"{common['times_one']:.2f}",
        f"{common['limit']}, {format_seconds(max(common['busy_s'].values()))}",
        _batches(common),
        format_bytes(own["ram_bytes"]) if "ram_bytes" in own else "",
        format_bytes(common["ram_bytes"]),
    ]


def _batches(row: Mapping[str, Any]) -> str:
    parts = f" in {row['parts']} parts" if row["parts"] > 1 else ""
    return f"{row['window']} x {row['batch']}{parts}"


def machines(section: Section, results: Sequence[Result]) -> str:
    """Return a row for each kind of machine and network: how many times one card so many are; empty if no results."""
    rows, counts = [], list[int]()
    for result in _in_order(results):
        found = result["figures"]["machines"]
        for network in dict.fromkeys(row["network"] for row in found):
            mine = [row for row in found if row["network"] == network]
            counts = [row["machines"] for row in mine]
            first, last = mine[0], mine[-1]
            update = f"{format_seconds(first['iteration_s'])} to {format_seconds(last['iteration_s'])}"
            sums = f"{format_seconds(mine[1]['busy_s'][_NETWORK])} to {format_seconds(last['busy_s'][_NETWORK])}"
            times = [f"{row['times_one']:.1f}" for row in mine]
            rows.append([result["settings"]["machine"], network, *times, update, sums])
    head = ["times one card; machines:", "network", *map(str, counts), "an update", "of it the network"]
    return _table(section, results, "Machines, simulated", head, rows)


def links(section: Section, results: Sequence[Result]) -> str:
    """Return the rows of one and two processes with slow links; empty if there are no results."""
    rows = []
    for result in results:
        figures = result["figures"]
        one = figures["rows"][0]["tokens_per_s"]
        for row in figures["rows"]:
            several = row["processes"] > 1
            rows.append(
                [
                    str(row["processes"]),
                    format_seconds(row["step_s"]),
                    format_seconds(row["h2d_s"]),
                    format_seconds(row["d2h_s"]),
                    format_rate(row["tokens_per_s"]),
                    f"{row['tokens_per_s'] / one:.2f}",
                    f"{figures['goal']:.2f}" if several else "",
                ]
            )
    return section("Slow links, measured", "scripts.links", results, HEAD_OF_LINKS, rows) if rows else ""


def _in_order(results: Sequence[Result]) -> list[Result]:
    return sorted(results, key=lambda result: int(result["settings"]["number"]))


def _table(section: Section, results: Sequence[Result], title: str, head: list[str], rows: list[list[str]]) -> str:
    return section(title, "scripts.cards", results, head, rows) if rows else ""
