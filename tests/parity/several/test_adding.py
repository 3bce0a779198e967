"""Gradients are added in the order of ranks: of several machines, and beside the backward in updates.

An update beside the backward comes after the gradients of all, before whoever uses the weights, and places are free
then. Copies of one process are late, and updates of another one as late as they may be.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.several.adding import EACH, MACHINES
from tests.parity.several.cases import IS_LATE, MORE, PAIRS, plan
from tests.parity.several.test_engines import require_equal
from tests.parity.several.training import HANG, Group

TWO = ("beside",)
THREE = (f"three, beside, accumulated, one idle{IS_LATE}",)
RUNS = {
    2: {f"{name}{IS_LATE}": PAIRS[name] for name in TWO},
    3: {name: MORE[3, 1][name] for name in THREE},
}


@pytest.mark.slow
def test_machines_add_in_the_order_of_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.parity.several.adding", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(MACHINES * EACH):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for way, equal in found.items():
            # Sums of sums are others: a sum of machines' sums would be seen here.
            assert equal == (not way.endswith("by machines")), (rank, way)


def test_updates_come_after_all_gradients_and_before_all_uses(tmp_path: Path) -> None:
    groups = []
    for ranks, cases in RUNS.items():
        group = Group(ranks)
        for name, (case, budget, settings) in cases.items():
            found = plan(case, budget, settings)
            assert set(found.update_places) == {"host"}
            assert not found.delayed
            group.runs.append((name, case, found, True))
        groups.append(group)
    (tmp_path / "groups").write_bytes(pickle.dumps(groups))
    command = [sys.executable, "-W", "error", "-m", "tests.parity.several.training", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.returncode == 0, ran.stderr
    for ranks, cases in RUNS.items():
        for name, (case, *_) in cases.items():
            require_equal(tmp_path, name, ranks, case)
