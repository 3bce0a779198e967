"""Whole runs of a Trainer by several processes end where those of one do that accumulates as many batches.

A checkpoint goes on with any number of processes: what is loaded is what was saved, bit for bit, and what follows is
what one process makes of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.several.runs import PLAIN, RESUMED, STOCK
from tests.parity.several.training import alike

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have left what they came to."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.parity.several.runs", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return found


@pytest.mark.parametrize("name", ["2", "2 on 2", "unfrozen", *RESUMED])
def test_they_end_where_one_process_does_that_accumulates(folder: Path, name: str) -> None:
    found, plain = read(folder, name), read(folder, name + PLAIN)
    for part in ("weights", "states", "steps"):
        assert alike(found[part], plain[part]), part


@pytest.mark.parametrize("name", ["2", "2 on 2", "unfrozen", "2 from 2"])
def test_they_end_where_stock_ddp_does(folder: Path, name: str) -> None:
    found, stock = read(folder, name), read(folder, name + STOCK)
    for part in ("weights", "states", "steps", "validation"):
        assert alike(found[part], stock[part]), part


@pytest.mark.parametrize(("name", "start"), [(name, start) for name, (_, start) in RESUMED.items()])
def test_what_is_loaded_is_what_was_saved(folder: Path, name: str, start: str) -> None:
    found, before = read(folder, name), read(folder, start)
    saved = torch.load(folder / f"{start}.ckpt", weights_only=True)
    assert alike(found["loaded"], (saved["state_dict"], saved["optimizer_states"][0]["state"]))
    assert alike(found["loaded"], (before["weights"], before["states"]))
    assert found["steps"] > before["steps"]
    assert not alike(found["weights"], before["weights"])


def test_a_layer_that_trains_later_is_updated_less_often(folder: Path) -> None:
    counts = {int(state["step"]) for state in read(folder, "unfrozen")["states"].values()}
    steps = read(folder, "unfrozen")["steps"]
    assert counts == {steps, steps - 2}
