"""Rows of a bench's result file: made from what became of a process, compared, kept. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_offload.replacing import replacing
from scripts.bench.contenders import NO_OFFLOAD
from scripts.bench.watch import Outcome
from scripts.common import now

Row = dict[str, Any]


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a row is about: a run without a budget is about the model only."""
    budget = row["budget_bytes"]
    return row["contender"], row["model"], budget


def make(asked: Row, answer: Mapping[str, Any] | None, outcome: Outcome, progress: Mapping[str, Any]) -> Row:
    """Return the row for one process.

    Args:
        asked: what was to be run: contender, model, budget.
        answer: what the process said; None if it died.
        outcome: what was seen from outside.
        progress: what the process had noted when it ended.
    """
    phases = progress.get("phases", [])
    if outcome.ended or answer is None:
        last = next((line.strip() for line in reversed(outcome.tail.splitlines()) if line.strip()), "")
        died = f"signal {-outcome.code}" if outcome.code < 0 else f"exit code {outcome.code}"
        where = f" in phase {phases[-1][0]!r}" if phases else ""
        message = f"ended{where}" if outcome.ended else f"{died}{where}; {last[:300]}"
        answer = {"status": outcome.ended or "failed", "message": message}
    row = {**asked, **answer, "seconds": outcome.seconds, "host_peak_bytes": outcome.host_peak_bytes}
    row["phases"] = _durations(phases)
    allocated = row.get("allocator_peak_bytes")
    if outcome.device_peak_bytes is not None:
        row |= {"device_peak_bytes": outcome.device_peak_bytes, "device_peak_by": "driver"}
    elif allocated is not None:
        row |= {
            "device_peak_bytes": allocated + progress.get("context_bytes", 0),
            "device_peak_by": "allocator and context",
        }
    elif "engine_peak_bytes" in row:
        row |= {"device_peak_bytes": row["engine_peak_bytes"], "device_peak_by": "emulated device"}
    peak, budget = row.get("device_peak_bytes"), row["budget_bytes"]
    if peak is not None and budget is not None:
        row["within_budget"] = peak <= budget
    return row


def _durations(phases: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return seconds per phase; the last one has no end."""
    return {name: after - start for (name, start), (_, after) in zip(phases, phases[1:], strict=False)}


def compare_losses(rows: Sequence[Row]) -> None:
    """Note in every row how far its losses are from those of the same model without offload."""
    found = {row["model"]: row["losses"] for row in rows if row["contender"] == NO_OFFLOAD.name and "losses" in row}
    for row in rows:
        reference, mine = found.get(row["model"]), row.get("losses")
        if reference is None or mine is None or len(reference) != len(mine):
            continue
        if None in reference or None in mine:
            row["loss_difference"] = None
        else:
            row["loss_difference"] = max(abs(a - b) for a, b in zip(reference, mine, strict=True))
        row["losses_equal"] = reference == mine and None not in mine


class Results:
    """The result file of one suite; written after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = {"kind": "bench", "settings": {}, "figures": {"rows": []}}
        if path.exists():
            self.document = json.loads(path.read_text("utf-8"))

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were measured."""
        found: list[Row] = self.document["figures"]["rows"]
        return found

    def find(self, wanted: tuple[Any, ...]) -> Row | None:
        """Return the row with the key ``wanted``."""
        return next((row for row in self.rows if key(row) == wanted), None)

    def describe(self, measured: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Set what holds for the whole file.

        Raises:
            SystemExit: if its rows were measured on another machine.
        """
        head = dict(measured)
        old = self.document.get("machine", head["machine"])
        same = all(old[name] == head["machine"][name] for name in ("gpu", "processor", "cores"))
        if self.rows and not same:
            here = head["machine"]["gpu"] or head["machine"]["processor"]
            raise SystemExit(
                f"{self.path} holds rows of another machine ({old['gpu'] or old['processor']}), this is {here}; "
                "give another folder with --out"
            )
        self.document |= {**head, **now(), "settings": dict(settings)}
        self._write()

    def add(self, row: Row) -> None:
        """Put ``row`` in, instead of an older one about the same, and write the file."""
        self.rows[:] = [other for other in self.rows if key(other) != key(row)]
        self.rows.append(row)
        compare_losses(self.rows)
        self._write()

    def _write(self) -> None:
        with replacing(self.path) as new:
            new.write_text(json.dumps(self.document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
