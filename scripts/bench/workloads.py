"""What the bench runs: models, shapes and budgets, in suites. Pure data; imports no torch.

On the emulated device the same architectures shrink to a few thousand parameters, so that every program can run there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from lt_offload.resources import shipped_files
from lt_offload.units import format_bytes

GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One model, one batch shape, one budget."""

    name: str
    config: str
    """Name of a shipped configuration."""
    dtype: str
    memory_bytes: int
    """Device memory for those contenders that are to do with little, context included."""
    batch_size: int = 4
    sequence_length: int = 512
    parts: int = 1
    """Parts of the batch that are computed one after the other."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Replace values of the configuration."""
    changed: str = ""
    """What the overrides make of the model, for people."""

    @property
    def model(self) -> str:
        """Return what is trained, whatever the budget: a run without one serves all workloads of the same model."""
        changed = f", {self.changed}" if self.changed else ""
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{self.config}{changed}, {self.dtype}, {self.batch_size} x {self.sequence_length}{parts}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the configuration's values."""
        values: dict[str, Any] = json.loads(shipped_files("configs/models", ".json")[self.config].read_text("utf-8"))
        return values | self.overrides

    def as_dict(self) -> dict[str, Any]:
        """Return what a result file says."""
        return asdict(self)


def _rows(rows: int, parts: int) -> str:
    return f"-{rows}-rows" + (f"-{parts}-parts" if parts > 1 else "")


PAPERS = (
    Workload(name="llama2-7b-fp32-10gb", config="llama2-7b", dtype="float32", memory_bytes=10 * GB),
    Workload(name="llama3-8b-12gb", config="llama3-8b", dtype="bfloat16", memory_bytes=12 * GB),
    Workload(name="mistral-7b-12gb", config="mistral-7b", dtype="bfloat16", memory_bytes=12 * GB),
    Workload(name="phi3-mini-12gb", config="phi3-mini", dtype="bfloat16", memory_bytes=12 * GB),
    Workload(name="bloom-3b-12gb", config="bloom-3b", dtype="bfloat16", memory_bytes=12 * GB),
)
"""OFFMATE's: its table 2 (top) and table 1, with batches of 4 x 512 tokens as in its figure 2."""
SMALL = (
    Workload(
        name="llama2-4-layers-fp32-4gb",
        config="llama2-7b",
        dtype="float32",
        memory_bytes=4 * GB,
        overrides={"num_hidden_layers": 4},
        changed="4 layers",
    ),
)
"""Four layers of the first of them: 17 GB of weights, gradients and states, so that 4 GB hold less than a quarter."""
BATCHES = tuple(
    Workload(
        name=f"llama3-8b-{gigabytes}gb{_rows(rows, parts)}",
        config="llama3-8b",
        dtype="bfloat16",
        memory_bytes=gigabytes * GB,
        batch_size=rows,
        parts=parts,
    )
    for gigabytes in (12, 24)
    for rows, parts in ((16, 1), (4, 1), (8, 1), (16, 4), (64, 16))
)
"""The same copies beside more and less to compute."""
OTHERS = (
    Workload(name="llama3-8b-24gb", config="llama3-8b", dtype="bfloat16", memory_bytes=24 * GB),
    Workload(name="llama3.2-1b-16gb", config="llama3.2-1b", dtype="bfloat16", memory_bytes=16 * GB),
)
"""One that has to travel, and one whose weights, gradients and states (10 GB) fit, so that all contenders can run."""
SUITES = {"others": OTHERS, "small": SMALL, "papers": PAPERS, "batches": BATCHES}

_TINY_BUDGET = {"float32": 2_600_000, "bfloat16": 1_400_000}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY_BLOOM = {"vocab_size": 256, "hidden_size": 64, "n_head": 4, "n_layer": 6, "pad_token_id": 0, "eos_token_id": 2}


_CONTEXT = 600 << 20
"""What a tiny workload is given for a GPU's context, and for the pieces in which torch's allocator takes memory."""


def workloads(suite: str, device: str, *, tiny: bool = False) -> tuple[Workload, ...]:
    """Return the workloads of ``suite``; tiny ones of the same architectures on ``"cpu"`` (the emulated device)."""
    chosen = SUITES[suite]
    if device == "cuda" and not tiny:
        return chosen
    return tuple(_shrunk(workload, chosen, _CONTEXT if device == "cuda" else 0) for workload in chosen)


def _shrunk(workload: Workload, among: tuple[Workload, ...], context: int) -> Workload:
    """Return a tiny workload; budgets, without ``context``, keep their ratio to the smallest of the same dtype."""
    least = min(w.memory_bytes for w in among if w.dtype == workload.dtype)
    memory = context + int(_TINY_BUDGET[workload.dtype] * workload.memory_bytes / least)
    size = format_bytes(memory).replace(" ", "").lower()
    small = _TINY_BLOOM if workload.config == "bloom-3b" else _TINY
    rows = workload.batch_size // 2
    parts = min(workload.parts, rows)
    return Workload(
        name=f"tiny-{workload.config}-{size}{_rows(rows, parts) if rows != 2 else ''}",
        config=workload.config,
        dtype=workload.dtype,
        memory_bytes=memory,
        batch_size=rows,
        parts=parts,
        sequence_length=16,
        overrides=dict(small),
        changed="tiny",
    )
