"""Lightning's launcher, torchrun and SLURM start the processes of a real script, which end with the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parity.several.script import STEPS
from tests.parity.several.training import HANG, free_port

ROOT = Path(__file__).parents[3]
SCRIPT = "tests.parity.several.script"
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2")


def launch(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts two processes."""
    own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, "-m", *command], env=own, capture_output=True, text=True, timeout=HANG, check=False
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Lightning's launcher has trained."""
    folder = tmp_path_factory.mktemp("whole")
    ran = launch(SCRIPT, str(folder))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


def require_same_end(whole: Path, other: Path) -> None:
    """Check that two runs have ended with the same weights."""
    (steps, weights), (same_steps, same_weights) = (
        torch.load(folder / "end.pt", weights_only=True) for folder in (whole, other)
    )
    assert steps == same_steps == STEPS
    assert weights.keys() == same_weights.keys()
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


@pytest.mark.long
def test_a_process_that_dies_under_torchrun_ends_where_lightnings_launcher_does(whole: Path, tmp_path: Path) -> None:
    ran = launch(*TORCHRUN, "--max-restarts", "1", "--module", SCRIPT, str(tmp_path), DIES="1")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert (tmp_path / "died").exists()
    require_same_end(whole, tmp_path)


@pytest.mark.long
def test_a_process_that_dies_on_one_of_two_machines_ends_there_too(whole: Path, tmp_path: Path) -> None:
    """Each machine has an agent of torchrun's; that of the other one starts its process again without counting it."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "run")
    machines = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting, "--max-restarts", "2")
    with ThreadPoolExecutor(2) as pool:
        start = partial(launch, *machines, "--module", SCRIPT, str(tmp_path), DIES="1", NODES="2")
        for ran in [pool.submit(start) for _ in range(2)]:
            assert ran.result().returncode == 0, ran.result().stderr[-3000:]
    assert (tmp_path / "died").exists()
    require_same_end(whole, tmp_path)


@pytest.mark.long
def test_processes_that_slurm_starts_end_there_too(whole: Path, tmp_path: Path) -> None:
    """What ``srun`` would set, simulated: one machine, a task for each device."""
    job = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1, "SLURM_NODEID": 0, "SLURM_JOB_ID": 4711}
    names = {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | names | {k: str(v) for k, v in job.items()}
    command = [sys.executable, "-m", SCRIPT, str(tmp_path)]
    tasks = [
        subprocess.Popen(
            command, env=own | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        said = [task.communicate(timeout=HANG)[1] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], said[0][-3000:] + said[1][-3000:]
    require_same_end(whole, tmp_path)
