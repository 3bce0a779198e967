"""kill -9 in real training: a seeded sample of what ``tests.faults.kill_training`` does a hundred times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sampling

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("options", sampling.some([[], ["--asynchronous"]], 1), ids=str)
def test_killed_runs_end_like_a_run_that_nobody_killed(options: list[str], tmp_path: Path) -> None:
    report = tmp_path / "kills.json"
    command = [
        sys.executable,
        "-m",
        "tests.faults.kill_training",
        "--kills",
        "2",
        "--seed",
        "5",
        "--output",
        report,
        *options,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert found["failures"] == []
    assert sum(found["kinds"].values()) == 2
    assert sum(count for kind, count in found["kinds"].items() if kind.startswith("in a save")) == 1
