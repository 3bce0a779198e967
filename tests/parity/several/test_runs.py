"""Whole runs of a Trainer by several processes end where those of one do that accumulates as many batches.

A checkpoint goes on with any number of processes: what is loaded is what was saved, bit for bit, and what follows is
what one process makes of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.replacing import SUFFIX
from lt_offload.strategy.checkpoint import files, sums
from tests.parity.several.runs import LATER, MIDWAY, PLAIN, RESUMED, SCALED, STOCK
from tests.parity.several.training import HANG, alike

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have left what they came to."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.parity.several.runs", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return found


@pytest.mark.parametrize("name", ["2", "2 on 2", "unfrozen", SCALED, *RESUMED])
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


def test_steps_that_a_scaler_leaves_out_update_nothing(folder: Path) -> None:
    found = read(folder, SCALED)
    assert {int(state["step"]) for state in found["states"].values()} == {found["steps"] // 2}


def test_a_layer_that_trains_later_is_updated_less_often(folder: Path) -> None:
    counts = {int(state["step"]) for state in read(folder, "unfrozen")["states"].values()}
    steps = read(folder, "unfrozen")["steps"]
    assert counts == {steps, steps - 2}


@pytest.mark.parametrize(("name", "ranks"), [("2", 2), (LATER, 2), ("4 from 2", 4)])
def test_every_process_writes_a_part_of_a_checkpoint(folder: Path, name: str, ranks: int) -> None:
    parts = [int((folder / f"{name}-{rank}.written").read_text()) for rank in range(ranks)]
    # The first one writes what is no tensor, too, much of so small a file.
    assert min(parts) > sum(parts) / ranks / 2


def test_a_checkpoint_of_all_is_one_that_any_program_reads(folder: Path) -> None:
    """Of each step there is a plain file, with sums, the same whether training waited for it or not."""
    kept, later = (sorted((folder / f"{name}, steps").glob("step*.ckpt")) for name in ("2", LATER))
    assert [path.name for path in kept] == [path.name for path in later]
    assert len(kept) == read(folder, "2")["steps"]
    before: Any = {}
    for path, other in zip(kept, later, strict=True):
        found, same = torch.load(path, weights_only=True), torch.load(other, weights_only=True)
        for part in ("state_dict", "optimizer_states", "loops", "lr_schedulers", "exact_resume"):
            assert alike(found[part], same[part]), part
        assert not alike(found["state_dict"], before)
        before = found["state_dict"]
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        sums.check(path, files.load(path))
    assert (kept[0].parent / "last.ckpt").resolve() == kept[-1].resolve()
    assert not list(folder.glob(f"**/.*{SUFFIX}"))


def test_others_go_on_in_the_middle_of_an_epoch_with_what_is_left_of_it(folder: Path) -> None:
    """A sampler that deals one order to all processes deals the same to any number of them."""

    def rows(name: str, ranks: int) -> list[list[int]]:
        each = [json.loads((folder / f"{name}-{rank}.rows").read_text()) for rank in range(ranks)]
        return [row for turn in zip(*each, strict=True) for row in turn]

    for name, ((ranks, _), _) in MIDWAY.items():
        assert rows("2", 2)[4:] == rows(name, ranks), "two updates of two were made before"
        assert read(folder, name)["steps"] == 2 + 4 // ranks
