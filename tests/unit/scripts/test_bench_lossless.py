"""The bench of the lossless form writes its figures, once on small tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from lt_offload.model.forms.lossless import host
from scripts.bench import lossless


def test_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lossless.py", "--tiny", "--threads", "1", "--results", str(tmp_path)])
    before = torch.get_num_threads()
    try:
        assert lossless.main() == 0
    finally:
        torch.set_num_threads(before)
    result = json.loads((tmp_path / "bench-lossless-tiny.json").read_text())
    assert result["kind"] == "bench-lossless"
    assert all(row["share"] < 0.72 and row["same_bits"] for row in result["figures"]["random"])
    rows = {(row["verb"], row["name"]): row for row in result["figures"]["cases"]}
    assert {("copy", "copy"), ("open", "torch"), ("close", "torch")} <= rows.keys()
    assert host.library() is None or {("open", "compiled"), ("close", "compiled")} <= rows.keys()
    assert rows["copy", "copy"]["of_copy"] == 1
