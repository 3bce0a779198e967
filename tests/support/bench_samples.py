"""Made-up rows and a made-up machine for the tests of the bench."""

from __future__ import annotations

from typing import Any

GB = 10**9
ASKED: dict[str, Any] = {
    "workload": "w",
    "contender": "auto",
    "title": "lt_offload, auto",
    "model": "m",
    "budget_bytes": 1000,
    "date": "2025-01-31",
}


def measured(**values: Any) -> dict[str, Any]:
    row = ASKED | {"status": "ok", "step_s": 1.0, "tokens": 100, "tokens_per_s": 100.0, "steps": 6, "notes": []}
    return row | {"seconds": 10.0, "loss": 2.0, "losses": [3.0, 2.0], "host_peak_bytes": 2 * GB} | values
