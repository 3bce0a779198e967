"""What passes before the first step is measured: each script once, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import tables
from scripts.startup import load


@pytest.mark.slow
def test_loading_is_measured_beside_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["load", "--tiny", "--rounds", "1", "--folder", str(tmp_path), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", options)
    load.main()
    result = json.loads((tmp_path / "results" / "bench-load.json").read_text())
    figures = result["figures"]
    assert result["settings"]["files"] > 2
    assert figures["file_bytes"] > 100_000
    assert all(len(figures[name]) == 1 and figures[name][0] > 0 for name in ("read_s", "keep_s", "load_s"))
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "what was made for it is gone"
    assert "copies in memory" in tables.render(tmp_path / "results")


def test_the_end_of_the_first_step_is_shown_in_a_table(tmp_path: Path) -> None:
    figures = {"plain_s": 10.0, "first_step_s": 12.5, "ratio": 1.25, "goal": 1.3}
    load.save("bench-start-x", "bench-start", {"recipe": "x"}, figures, tmp_path)
    assert "| `x` | 10 s | 12.5 s | 1.25 | 1.30 |" in tables.render(tmp_path)
