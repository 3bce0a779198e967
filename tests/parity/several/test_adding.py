"""Gradients of several machines are added in the order of ranks, however long they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.several.adding import EACH, MACHINES


@pytest.mark.slow
def test_machines_add_in_the_order_of_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.parity.several.adding", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(MACHINES * EACH):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for way, equal in found.items():
            # Sums of sums are others: without the chain this test would see it.
            assert equal == (not way.endswith("by machines")), (rank, way)
