"""Something goes wrong in one of several processes: all leave, the first error is what all say, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.several import KINDS, SIZES, at_fault, places
from tests.parity.several.training import HANG

ROOT = Path(__file__).parents[2]
OWN = {"raise": r"ValueError: broken here", "over budget": r"OverBudget: .+"}
"""What the process says in which it goes wrong."""
OTHERS = {
    "raise": r"ProcessError: process {rank} failed: ValueError: broken here",
    "over budget": r"ProcessError: process {rank} failed: .*device memory.*",
    "kill": r"ProcessError: process {rank} \(\d+ on .+\) ended without a word, killed perhaps",
    "stop": r"ProcessError: process {rank} \(\d+ on .+\) has not answered for \d+ s: it is stopped, or its machine is",
}
GONE = r"ProcessError: process {rank} \(\d+ on .+\) is gone: .+"
"""What those of another machine say when it is killed that has the run's store."""
KILLED = -9


@pytest.mark.long
@pytest.mark.parametrize(("count", "machines"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_one_process_ends_all(tmp_path: Path, kind: str, count: int, machines: int) -> None:
    command = [sys.executable, "-m", "tests.faults.several", str(tmp_path), kind, str(count), str(machines)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        _, said = run.communicate(timeout=HANG)
    assert run.returncode == 0, said[-2000:]
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)
    found = json.loads((tmp_path / "found.json").read_text())
    assert tuple(found) == places(kind, count, machines)
    for place, case in found.items():
        require(kind, at_fault(place, count), case, count, machines)
    if "part" in found:
        # The second file was being written, and is not there.
        assert [name for name in found["part"]["checkpoints"] if not name.startswith(".")] == ["step=1.ckpt"]


def require(kind: str, rank: int, case: dict[str, Any], count: int, machines: int) -> None:
    """Check what became of all processes, of which ``rank`` had the fault."""
    assert case["fault"], case
    assert case["alive"] == [], case
    own = case["said"][rank]
    expected = GONE if machines > 1 and (kind, rank) == ("kill", 0) else OTHERS[kind]
    for other in range(count):
        if other != rank:
            assert re.fullmatch(expected.format(rank=rank), case["said"][other]), case
            assert case["codes"][other] == 1
    if kind in OWN:
        assert re.fullmatch(OWN[kind], own), case
        assert case["codes"][rank] == 1
    elif machines == count and kind == "stop":  # it went on when all was over
        assert own.startswith("ProcessError: process "), case
        assert case["codes"][rank] == 1
    else:
        assert own is None, case
        assert case["codes"][rank] == KILLED
    assert case["torn"] == case["left in shared memory"] == []
    kept = [name for name in case["checkpoints"] if not name.startswith(".")]
    # A process that is killed in the middle of a file cannot remove it; the next run does.
    assert kept == case["checkpoints"] or kind in ("kill", "stop")
    assert case["cleaned"]
