"""What the bench runs: models, shapes and budgets, in suites. Pure data; imports no torch.

On the emulated device the same architectures shrink to a few thousand parameters, so that every program can run there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lt_offload.resources import shipped_files
from lt_offload.units import format_bytes

GB = 10**9
BYTES = {"float32": 4, "bfloat16": 2}


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
    overrides: dict[str, Any] = field(default_factory=dict)
    """Replace values of the configuration."""
    changed: str = ""
    """What the overrides make of the model, for people."""

    @property
    def model(self) -> str:
        """Return what is trained, whatever the budget: a run without one serves all workloads of the same model."""
        changed = f", {self.changed}" if self.changed else ""
        return f"{self.config}{changed}, {self.dtype}, {self.batch_size} x {self.sequence_length}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the configuration's values."""
        values: dict[str, Any] = json.loads(shipped_files("configs/models", ".json")[self.config].read_text("utf-8"))
        return values | self.overrides

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        settings = self.settings
        return int(settings.get("num_hidden_layers") or settings["n_layer"])

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and two moments, about: for estimates of time only."""
        s = self.settings
        width, heads = s["hidden_size"], s.get("num_attention_heads") or s["n_head"]
        inner, gated = s.get("intermediate_size"), s["model_type"] not in ("bloom", "phi")
        keys = width * s.get("num_key_value_heads", heads) // heads
        layer = 2 * width * (width + keys) + (3 if gated else 2) * width * (inner or 4 * width)
        tables = s["vocab_size"] * width * (1 if s.get("tie_word_embeddings") else 2)
        return 4 * BYTES[self.dtype] * (self.layers * layer + tables)

    @property
    def largest_tensor(self) -> int:
        """Number of elements of the largest weight, about."""
        s = self.settings
        width = s["hidden_size"]
        return int(width * max(s["vocab_size"], s.get("intermediate_size") or 4 * width))

    def with_layers(self, count: int) -> Workload:
        """Return the same model with fewer layers."""
        key = "n_layer" if "n_layer" in self.settings else "num_hidden_layers"
        return replace(self, overrides=self.overrides | {key: count}, changed=f"{count} layers")

    def as_dict(self) -> dict[str, Any]:
        """Return what a result file says."""
        return asdict(self)


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
CURVE = tuple(
    Workload(name=f"phi3-mini-{size}gb", config="phi3-mini", dtype="bfloat16", memory_bytes=size * GB)
    for size in (48, 8, 24, 12, 16)
)
"""From hardly anything resident to everything."""
BATCHES = tuple(
    Workload(
        name=f"llama3-8b-12gb-{size}-rows",
        config="llama3-8b",
        dtype="bfloat16",
        memory_bytes=12 * GB,
        batch_size=size,
    )
    for size in (16, 4)
)
"""The same copies beside more and less to compute."""
SUITES = {"small": SMALL, "papers": PAPERS, "curve": CURVE, "batches": BATCHES}

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
    return Workload(
        name=f"tiny-{workload.config}-{size}{f'-{rows}-rows' if rows != 2 else ''}",
        config=workload.config,
        dtype=workload.dtype,
        memory_bytes=memory,
        batch_size=rows,
        sequence_length=16,
        overrides=dict(small),
        changed="tiny",
    )
