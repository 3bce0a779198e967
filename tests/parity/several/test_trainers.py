"""A Trainer with ``devices=2``: the numbers of stock ``ddp``, one checkpoint for all, errors that say who failed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.several.training import HANG


@pytest.mark.long
def test_two_processes_under_a_trainer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parity.several.trainers", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for found in (first, second):
        assert found["differences"] == []
        assert found["edited"] == []
        assert found["scaled"] == []
        assert found["averaged"] == []
        assert "cannot be opened: [Errno 13] Permission denied" in found["closed"]
        assert (
            "start all of them by the same user, in one container, with /proc mounted, or set devices=1"
            in (found["closed"])
        )
        assert "is too small for LlamaForCausalLM" in found["small"]
        assert "need at least host_memory=" in found["small"]
        assert "for 2 processes, which have frozen weights and those that the host updates in common" in found["small"]
        assert "InfeasibleError: memory=1 kB is too small for LlamaForCausalLM" in found["tiny"]
        assert re.search(r"memory=\d+KB is enough", found["tiny"])
        assert found["steps"] > 2
        assert (
            "memory differs between the processes of this run: process 0 has 40000000, process 1 41000000"
            in (found["settings"])
        )
        assert (
            "the number of training batches differs between the processes of this run: process 0 has 4, process 1 6"
            in (found["uneven"])
        )
        assert found["skipped"].startswith(
            "RuntimeError: Skipping the `training_step` by returning None in distributed"
        )
        # Before the validation that follows on it in the first process, where the second one would not come.
        assert "they are at batch 4, the last one (process 0), at batch 4 (process 1); give all" in found["streamed"]
        assert found["chosen"] == (found["chosen"][0], [])
    assert first["closed"].startswith("ProcessError: process 1 failed: ConfigError: devices: the processes of this")
    assert second["closed"].startswith("ConfigError: devices: the processes of this machine share memory")
    assert first["small"].startswith("InfeasibleError: host_memory=")
    assert second["small"].startswith("ProcessError: process 0 failed: InfeasibleError: host_memory=")
    assert first["chosen"] == second["chosen"]
    assert first["chosen"][0] > 1
    assert first["broken"] == "ProcessError: process 1 failed: ValueError: broken here"
    assert second["broken"] == "ValueError: broken here"
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], first["weights"][name]) for name in saved)
