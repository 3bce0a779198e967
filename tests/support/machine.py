"""This machine: measured once, which is most of a tiny model's profile, and the RAM that runs take of it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from lt_offload.profiling.hardware import measure_hardware
from lt_offload.schema.profile import HardwareProfile


@functools.cache
def this_machine() -> HardwareProfile:
    return measure_hardware("cpu")


def takes_no_more(child: str, folder: Path) -> None:
    """Run ``child``, a program, for two steps and again up to four; compare plans and peaks.

    Weights and states take 170 MB. The heap is not to keep what is freed: nobody could say how much that is.

    Args:
        child: is given ``folder`` and the steps; prints the process's and the device's bytes of its plan, and its peak.
        folder: where it finds what it has saved.
    """
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }

    def run(steps: int) -> list[int]:
        command = [sys.executable, "-c", child, str(folder), str(steps)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.splitlines()[-1].split()]

    (process, device, peak), (again, same, after) = run(2), run(4)
    assert (again, same) == (process, device)
    assert after < peak + 40_000_000
