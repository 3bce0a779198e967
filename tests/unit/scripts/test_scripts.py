"""The measuring scripts: their parts on hand-made results, and each of them once on a tiny model."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lt_offload.cli.main import main
from scripts import common, compare, tables
from tests.support import tiny


def test_the_pages_of_this_repository_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def test_results_carry_machine_versions_date_and_commit(tmp_path: Path) -> None:
    path = common.save("name", "compare", {"steps": 1}, {"loss": 0.5}, tmp_path / "new")
    result = json.loads(path.read_text())
    assert path.name == "name.json"
    assert (result["kind"], result["settings"], result["figures"]) == ("compare", {"steps": 1}, {"loss": 0.5})
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["processor"]
    assert result["versions"]["torch"][0].isdigit()
    assert len(result["date"]) == 10
    assert result["commit"].partition("-dirty")[0].isalnum()


CHILD = """
from scripts.common import in_child, serve_child

def double(value):
    print("noise")
    return {"twice": 2 * value}

def fail():
    raise RuntimeError("no")

if __name__ == "__main__":
    serve_child(double, fail)
"""


def test_jobs_run_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = common.in_child("program", "double", value=21)
    assert answer == {"twice": 42}
    assert capfd.readouterr().out == ""
    with pytest.raises(SystemExit, match=r"program: fail failed \(exit code 1\)"):
        common.in_child("program", "fail")


def test_the_largest_difference_is_found_wherever_it_is() -> None:
    left = {"state": {0: {"exp_avg": torch.tensor([1.0, 2.0]), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]}
    right = copy.deepcopy(left)
    assert compare.largest_difference(left, right) == 0
    right["state"][0]["exp_avg"][1] += 0.25
    assert compare.largest_difference(left, right) == 0.25
    right["groups"][0]["lr"] = 1.1
    assert compare.largest_difference(left, right) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, float("nan")])},
        {"w": torch.tensor([1.0])},
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([1.0, 2.0]), "more": 1},
        {"w": "text"},
    ],
    ids=["not a number", "shape", "dtype", "keys", "type"],
)
def test_what_cannot_be_compared_is_not_called_equal(other: dict[str, Any]) -> None:
    assert compare.largest_difference({"w": torch.tensor([1.0, 2.0])}, other) is None


def test_the_plain_run_gets_no_settings_of_the_strategy() -> None:
    given = ["--trainer.strategy.memory", "1GB", "--model.lr=1", "--trainer.strategy=x", "--data.pack", "false"]
    assert compare.without_strategy(given) == ["--model.lr=1", "--data.pack", "false"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of a tiny random model on a little text."""
    model = tiny.model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    path = tmp_path / "tiny.yaml"
    settings = {
        "base": "configs/base.yaml",
        "trainer": {"accelerator": "cpu"},
        "model": {"name": str(model), "lr": 0.01},
        "data": {"path": str(tmp_path / "text.txt"), "max_length": 32, "batch_size": 2},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_compare_trains_both_ways_and_finds_no_difference(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(command: list[str]) -> int:
        """Run the command in this process: most of its time would be imports."""
        assert command[1:3] == ["-m", "lt_offload.cli.main"]
        return main(command[3:])

    monkeypatch.setattr(compare, "run", here)
    results = tmp_path / "results"
    program = ["compare", str(recipe), "--steps", "3", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", [*program, "--trainer.strategy.memory", "400kB"])
    assert compare.main() == 0
    assert "largest difference in optimizer: 0" in capsys.readouterr().out
    result = json.loads((results / "compare-tiny.json").read_text())
    figures = result["figures"]
    assert figures["difference"] == {"loss": 0, "weights": 0, "optimizer": 0}
    assert figures["stock"]["losses"] == figures["offmate"]["losses"]
    assert len(set(figures["stock"]["losses"])) == 3, "a model that learns nothing proves nothing"
    assert "plan" not in figures["stock"]
    assert figures["offmate"]["plan"]["budget_bytes"] == 400_000
    assert 0 < figures["offmate"]["device_peak_bytes"] <= 400_000 < figures["stock"]["device_peak_bytes"]
