"""Records of a training beside its checkpoints."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor

from lt_offload.errors import ConfigError
from lt_offload.replacing import save_text
from lt_offload.report.perfetto import save_perfetto
from lt_offload.schema.trace import Trace
from lt_offload.strategy.replay import Before

FOLDER = "lt_offload"
"""The folder of reports in the Trainer's ``output_dir``."""
RECORD = "lt_offload.json"
"""The file in a checkpoint with the record of its run."""
_NAMES = {"loss": "train_loss", "learning_rate": "lr", "eval_loss": "val_loss"}
"""Names in a report, by the names under which a Trainer logs."""
_KEPT = ("grad_norm", "tokens_per_s", "step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb")


class Speed:
    """Tokens per second of training since the last :meth:`restart`."""

    def __init__(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()

    def trains(self, batches: Sequence[Any]) -> None:
        """Take note of the micro-batches of an update."""
        for batch in batches:
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            self._tokens += ids.numel() if isinstance(ids, Tensor) else 0

    def restart(self) -> float:
        """Return the tokens per second, 0 if batches have no tokens, and begin to count anew."""
        now = time.perf_counter()
        tokens_per_s = self._tokens / (now - self._since)
        self._tokens, self._since = 0, now
        return tokens_per_s


def read_record(checkpoint: Path, say: Callable[[str], None]) -> Before:
    """Return the record in the folder of a ``checkpoint``; an empty one if plain transformers wrote it.

    ``say`` tells the user what differs from that run. Raises ``ConfigError`` if that cannot be read.
    """
    path = checkpoint / RECORD
    if not path.is_file():
        return Before()
    try:
        return Before.of(json.loads(path.read_text(encoding="utf-8")), say)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); use another checkpoint, or remove that file: "
            "the run is then planned again, and trains what is not frozen"
        ) from error


def save_report(folder: Path, trace: Trace, history: Sequence[Mapping[str, Any]]) -> None:
    """Write the ``trace`` of the last iteration, the logged metrics, and the page about both, into ``folder``."""
    trace.save(folder / "trace.json")
    save_perfetto(trace, folder / "trace.perfetto.json")
    save_text(folder / "metrics.csv", _metrics(history))
    # Drawing is imported where it is done: it takes a while, and a Trainer that saves nothing needs none.
    from lt_offload.report.run_page import write_run_report

    write_run_report(folder)


def _metrics(history: Sequence[Mapping[str, Any]]) -> str:
    rows: dict[int, dict[str, Any]] = {}
    for record in history:
        values = {_NAMES.get(name, name): value for name, value in record.items() if name in _NAMES or name in _KEPT}
        if values and record.get("step"):
            rows.setdefault(record["step"], {}).update(values)
    names = sorted({name for row in rows.values() for name in row})
    table = StringIO()
    writer = csv.DictWriter(table, ["step", *names])
    writer.writeheader()
    writer.writerows({"step": step - 1, **row} for step, row in sorted(rows.items()))  # counted from 0, as there
    return table.getvalue()
