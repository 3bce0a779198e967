"""Tables of what was run on GPUs: outcomes of ``scripts.gpu``, and budgets beside what the driver showed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_offload.units import format_bytes, format_seconds
from scripts.docs.figures import origins

Result = Mapping[str, Any]

WHAT = {
    "first": "where device memory goes while training begins",
    "smoke": "what the engine relies on: attention, products, events, copies both ways",
    "memory": "three budgets: peaks, times, overlap",
    "parity": "equality with plain PyTorch, models and options",
    "settings": "deterministic or not, compiled blocks",
    "users": "equality with stock Lightning: hooks, callbacks, checkpoints",
    "loops": "equality with loops of one's own, the command line",
    "engine": "the device, its refusals, what is left behind",
    "cards": "two cards",
    "races": "accesses that streams do not order",
    "kernels": "Liger's kernels",
    "measuring": "a machine is measured (7 of the tests)",
    "launch": "what launching costs",
    "update": "updates on the host",
}
PEAK, TIME = "test_the_peak_is_within_the_budget", "test_the_time_is_what_was_predicted"


def blocks(root: Path) -> dict[str, str]:
    """Return the tables for the files of kind ``gpu`` below ``root``, by the names of their marks."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "results/gpu").glob("*.json"))]
    results = [result for result in found if result["kind"] == "gpu"]
    return {"runs": runs(results), "budgets": budgets(results)}


def runs(results: Sequence[Result]) -> str:
    """Return the outcome of every part in every run."""
    if not results:
        return ""
    rows = ["| part | | " + " | ".join(f"run {number + 1}" for number in range(len(results))) + " |"]
    rows.append("|---|---|" + "---|" * len(results))
    for name, what in WHAT.items():
        cells = [_outcome(result, name) for result in results]
        if any(cells):
            rows.append(f"| {name} | {what} | {' | '.join(cells)} |")
    made = origins([dict(result) for result in results])
    return "\n".join([*rows, "", f"Parts of `make gpu` ({made}). A part that ran out of time ended between two tests."])


def _outcome(result: Result, name: str) -> str:
    for part in result["figures"]["parts"]:
        if part["name"] == name:
            break
    else:
        return ""
    if part.get("passed") is None:
        return str(part["status"])
    if not part["passed"] and part.get("skipped"):
        return "not run: one card"
    failed = len(part.get("failures") or {})
    said = f"{part['passed']} passed" + (f", {failed} failed" if failed else "")
    return said + (", out of time" if part["status"] == "time limit" else "")


def budgets(results: Sequence[Result]) -> str:
    """Return the budgets of the part ``memory`` with the peaks and times that were planned, and those that came."""
    rows = [
        "| budget | planned peak | peak, by the driver | planned step | measured step |",
        "|---:|---:|---:|---:|---:|",
    ]
    made: list[dict[str, Any]] = []
    for result in results:
        for part in result["figures"]["parts"]:
            figures = (part.get("figures") or {}) if part["name"] == "memory" else {}
            for test, peak in figures.items():
                if test.startswith(PEAK):
                    seconds = figures[test.replace(PEAK, TIME)]
                    sizes = (format_bytes(peak[key]) for key in ("budget", "predicted", "peak"))
                    times = (format_seconds(seconds[key]) for key in ("predicted_s", "measured_s"))
                    rows.append(f"| {' | '.join((*sizes, *times))} |")
                    made.append(dict(result))
    said = f"160 million parameters in fp32, 4 x 512 tokens ({origins(made)})."
    return "\n".join([*rows, "", said]) if made else ""
