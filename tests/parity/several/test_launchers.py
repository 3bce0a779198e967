"""Lightning's launcher and torchrun start the processes of a real script; torchrun's restart resumes it bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.several.script import STEPS

ROOT = Path(__file__).parents[3]
SCRIPT = "tests.parity.several.script"


def launch(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts two processes."""
    own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, "-m", *command], env=own, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.slow
def test_a_process_that_dies_under_torchrun_ends_where_lightnings_launcher_does(tmp_path: Path) -> None:
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    whole.mkdir()
    restarted.mkdir()
    ran = launch(SCRIPT, str(whole))
    assert ran.returncode == 0, ran.stderr[-3000:]
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--module")
    ran = launch(*torchrun, SCRIPT, str(restarted), DIES="1")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert (restarted / "died").exists()
    (steps, weights), (same_steps, same_weights) = (
        torch.load(folder / "end.pt", weights_only=True) for folder in (whole, restarted)
    )
    assert steps == same_steps == STEPS
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
