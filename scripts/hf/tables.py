"""Rows for the tables of docs/benchmarks.md from what ``python -m scripts.hf`` has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lt_offload.units import format_bytes, format_seconds

BUDGETS = ("tight", "middle", "resident", "recompute")
HEAD = ["run", "updates", *BUDGETS]
_IMPORTS = {
    "plain": "fits with a plain Trainer of Lightning",
    "imported": "imports lt_offload, and fits likewise",
    "strategy": "fits with the strategy",
    "hf": "makes the context of `hf_trainer`, and fits plainly",
}


def sections(section: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table per library, made by ``section``."""
    return "\n\n".join(section(title(each), command(each), [each], HEAD, rows(each)) for each in results)


def title(result: Mapping[str, Any]) -> str:
    """Return what was compared."""
    settings = result["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in settings["packages"].items())
    device = settings["device"]
    if "fake" in device:
        device += ", whose context and allocator take 275 MB of these budgets"
    return f"Trainers of {settings['library']} on {device}, against plain runs, bit for bit: {packages}"


def command(result: Mapping[str, Any]) -> str:
    """Return how to do it again."""
    fake = " --device fake" * ("fake" in result["settings"]["device"])
    return f"scripts.hf {result['settings']['library']}{fake} --save"


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a line per run: what is not the same, or in how much device memory everything is."""
    return [
        [f"`{each['case']}`", str(each["steps"]), *(_cell(each["budgets"].get(name)) for name in BUDGETS)]
        for each in result["figures"]["cases"]
    ]


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return "; ".join(found["differs"]) or f"equal, {format_bytes(found['device_peak_bytes'])}"


def imports(section: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what it costs that all this is there, made by ``section``."""
    lines = [
        [
            _IMPORTS[row["way"]],
            f"{format_seconds(row['processor_s'])} ({row['processor_ratio']:.2f})",
            f"{format_bytes(row['rss_bytes'])} ({row['rss_ratio']:.2f})",
            str(row["loaded"]),
        ]
        for result in results
        for row in result["figures"]["ways"]
    ]
    head = ["a process that", "processor (ratio)", "memory (ratio)", "modules of `lt_offload.hf`, TRL and HF's Trainer"]
    return section("Imports", "scripts.startup.imports", results, head, lines)
