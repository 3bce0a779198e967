"""The table of budgets of docs/gpu.md: what was planned beside what the driver of a real GPU showed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_offload.units import format_bytes, format_seconds
from scripts.docs.figures import origins

Result = Mapping[str, Any]

PEAK, TIME = "test_the_peak_is_within_the_budget", "test_the_time_is_what_was_predicted"


def budgets(root: Path) -> str:
    """Return the table of the files of kind ``gpu`` below ``root``."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "results/gpu").glob("*.json"))]
    return table([document for document in documents if document["kind"] == "gpu"])


def table(results: Sequence[Result]) -> str:
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
