"""Rows for the tables of docs/gpu.md from the result files of the suites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lt_offload.units import format_bytes, format_seconds
from scripts.bench.contenders import CONTENDERS, FSDP2, NO_OFFLOAD, OURS, TRANSFORMERS, Contender

Row = dict[str, Any]

TITLES = {
    "others": "Beside what users would take instead",
    "small": "The same step in the same memory",
    "papers": "Models that do not fit, in the memory of a small card",
    "batches": "The same copies beside more and less to compute",
}
HEAD = [
    "model, budget",
    "trained by",
    "tokens/s",
    "step",
    "of no offload",
    "of FSDP2",
    "of transformers",
    "predicted step",
    "bound",
    "device peak",
    "RAM",
    "losses",
]


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a line per measured row; what failed says why."""
    found: list[Row] = result["figures"]["rows"]
    order = {name: place for place, name in enumerate(CONTENDERS)}
    models = {model: place for place, model in enumerate(dict.fromkeys(row["model"] for row in found))}
    ordered = sorted(
        found, key=lambda row: (models[row["model"]], row["budget_bytes"] or 0, order.get(row["contender"], len(order)))
    )
    return [_line(row, found) for row in ordered]


def _line(row: Row, found: Sequence[Row]) -> list[str]:
    budget = row["budget_bytes"]
    head = [f"{row['model']}, {format_bytes(budget) if budget else 'all memory'}", row["title"]]
    if row["status"] != "ok":
        return [*head, row["status"], *[""] * (len(HEAD) - len(head) - 1)]
    plan = row.get("plan") or {}
    return [
        *head,
        f"{row['tokens_per_s']:.0f}",
        format_seconds(row["step_s"]),
        _ratio(row, no_offload(row, found)),
        _ratio(row, beside(row, FSDP2, found)),
        _ratio(row, beside(row, TRANSFORMERS, found)),
        format_seconds(plan["predicted_s"]) if plan else "",
        format_seconds(plan["lower_bound_s"]) if plan else "",
        _device(row),
        format_bytes(row["host_peak_bytes"]) if "host_peak_bytes" in row else "",
        _losses(row),
    ]


def no_offload(row: Row, found: Sequence[Row]) -> Row | None:
    """Return the run of the same model that had all memory, if it was measured."""
    return _by(NO_OFFLOAD, (r for r in found if r["model"] == row["model"]))


def beside(row: Row, other: Contender, found: Sequence[Row]) -> Row | None:
    """Return another contender's run of the same model in the same memory beside one of ours, if it was measured."""
    if row["contender"] != OURS.name:
        return None
    same = ("model", "budget_bytes")
    return _by(other, (r for r in found if all(r[name] == row[name] for name in same)))


def _by(contender: Contender, found: Iterable[Row]) -> Row | None:
    return next((row for row in found if row["contender"] == contender.name and row["status"] == "ok"), None)


def _ratio(row: Row, other: Row | None) -> str:
    return "" if other is None else f"{row['tokens_per_s'] / other['tokens_per_s']:.2f}"


def _device(row: Row) -> str:
    peak = row.get("device_peak_bytes")
    if peak is None:
        return ""
    return format_bytes(peak) + ("" if row.get("within_budget", True) else " (over the budget)")


def _losses(row: Row) -> str:
    if row.get("losses_equal"):
        return "equal"
    difference = row.get("loss_difference")
    return "" if difference is None else f"Δ {difference:.1e}"
