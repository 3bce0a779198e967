"""The bench of host updates writes its figures, once on small tensors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from lt_offload.optim import native
from scripts.bench import update


def test_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["bench_update.py", "--tiny", "--threads", "1", "--results", str(tmp_path)])
    before = torch.get_num_threads()
    try:
        assert update.main() == 0
    finally:
        torch.set_num_threads(before)
    result = json.loads((tmp_path / "bench-update-tiny.json").read_text())
    assert result["kind"] == "bench-update"
    rows = {(row["name"], row["scheme"]): row for row in result["figures"]["cases"]}
    by_kernel = {("lt_offload kernel", "masters"), ("native", "fp32 loop"), ("in cache", "float16 fused")}
    assert native.kernel() is None or by_kernel <= rows.keys()
    assert rows["torch", "bfloat16 fused"]["of_torch"] == 1
    assert rows["torch", "bfloat16 fused"]["bytes_per_weight"] == 14
    assert rows["memory", "masters"]["of_memory"] == 1
    assert rows["copy", "copy"]["of_memory"] is None
    assert all(
        row["bytes_per_s"] == pytest.approx(row["weights_per_s"] * row["bytes_per_weight"]) for row in rows.values()
    )


def test_moments_of_fewer_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    flags = ["--moments", "--tiny", "--threads", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_update.py", *flags])
    before = torch.get_num_threads()
    try:
        assert update.main() == 0
    finally:
        torch.set_num_threads(before)
    cases = json.loads((tmp_path / "bench-update-moments-tiny.json").read_text())["figures"]["cases"]
    moved = {case["scheme"]: case["bytes_per_weight"] for case in cases if case["name"].startswith("lt_offload")}
    assert native.kernel() is None or len(moved) == 9
    assert moved["rounded, moments 8 bits"] == 10
