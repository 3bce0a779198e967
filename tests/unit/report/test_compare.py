"""Runs beside each other: what differs, what is the same bit for bit, and errors for what cannot be compared."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.cli.main import main
from lt_offload.errors import ConfigError
from lt_offload.report.compare import read_runs, tables, trajectories
from lt_offload.report.runs import write_part
from tests.support.reports.run_folders import ENDED, PLAN, make_run, rows, write_metrics


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", planned=False, steps=30)
    return tmp_path


def test_losses_speed_and_memory(here: Path) -> None:
    found = tables(read_runs(["one", "two"]))["figures"]
    assert found["steps"] == ["40", "30"]
    assert found["training loss, first"] == ["3.0000", "3.0000"]
    assert found["training loss, step 30"][0] == found["training loss, step 30"][1] == found["training loss, last"][1]
    assert found["held-out loss, best"] == ["1.2109 at 40", "1.4352 at 30"]
    assert found["held-out loss, step 30"][0] == "1.4352"
    assert found["tokens/s"] == ["579.5", "572"]
    assert found["iteration"] == ["1.83 s", "–"]
    assert found["device budget"] == ["440 MB", "–"]
    assert found["device peak"] == ["423 MB", "–"]
    assert "model FLOPs use" not in found


def test_settings_and_plans_that_differ(here: Path) -> None:
    make_run(here / "three", lr=2e-4)
    replace(PLAN, planner="greedy").save(here / "three" / "plan.json")
    ours = "lt_offload.OffmateStrategy"
    assert tables(read_runs(["one", "two", "three"]))["settings that differ"] == {
        "trainer.strategy": [ours, "auto", ours],
        "trainer.strategy.memory": ["440MB", "–", "440MB"],
        "trainer.max_steps": ["40", "30", "40"],
        "model.lr": ["0.0001", "0.0001", "0.0002"],
    }
    assert tables(read_runs(["one", "two"]))["plans that differ"] == {}
    assert tables(read_runs(["one", "three"]))["plans that differ"] == {"planner": ["offmate", "greedy"]}


def test_a_group_of_settings_that_only_one_run_has(here: Path) -> None:
    config = here / "one" / "config.yaml"
    config.write_text(config.read_text().replace("lora: null", "lora: {r: 8}"))
    assert tables(read_runs(["one", "two"]))["settings that differ"]["model.lora.r"] == ["8", "–"]


def test_identical_trajectories(here: Path) -> None:
    [said] = trajectories(read_runs(["one", "two"]))
    assert said == "Identical trajectories: two and one have equal losses in all 30 steps in common, bit for bit."
    changed = rows(0, 30, planned=False)
    changed[11]["train_loss"] = math.nextafter(changed[11]["train_loss"], 9)
    write_metrics(here / "two" / "metrics.csv", changed)
    [said] = trajectories(read_runs(["one", "two"]))
    assert said.startswith("Different trajectories: two and one differ from step 11 on (2.")
    write_metrics(here / "two" / "metrics.csv", rows(50, 60))
    assert trajectories(read_runs(["one", "two"])) == ["two and one have no step in common."]


def test_in_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one", "two"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "OffmateStrategy" in out
    assert "Identical trajectories" in out
    folders = [str(make_run(here / "runs" / f"llama2-7b-12gb-2026010{day}-120000")) for day in range(1, 5)]
    assert main(["compare", *folders]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:20])) <= 80
    assert "settings that differ" not in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "compare needs RUNS: lt-finetune compare RUNS ..."),
        (["one"], "compare needs two run folders or more, got 1"),
        (["one", "gone"], "'gone' is not a run folder: there is no such folder"),
        (["one", "./one"], "'./one' is given twice"),
        (["one", "bare"], "'bare' has no metrics.csv to compare"),
        (["one", "two", "--save", "page.html"], "unknown flag --save"),
    ],
)
def test_one_clear_error(here: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bare").mkdir()
    (here / "bare" / "config.yaml").write_text("model: {name: x}\n")
    assert main(["compare", *args]) == 2
    assert message in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(here: Path) -> None:
    make_run(here / "other" / "one")
    assert list(read_runs(["one", "other/one"])) == ["one", "other/one"]
    with pytest.raises(ConfigError, match="given twice"):
        read_runs(["one", "two", "other/../one"])


def test_a_single_run_that_was_resumed_by_its_parts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = replace(ENDED, last_step=30, ended="interrupted")
    second = replace(ENDED, first_step=30, loss_before=None, process_peak_bytes=4_000_000_000)
    write_part(here / "one", first)
    write_part(here / "one", second)
    figures = tables(read_runs(["one"]))["figures"]
    assert list(read_runs(["one"])) == ["steps 1 to 30", "steps 31 to 40"]
    assert figures["ended"] == ["interrupted", "finished"]
    assert figures["held-out loss, first"][0] == "3.5000"
    assert figures["held-out loss, last"] == ["1.4352", "1.2109"]
    assert figures["RAM of the process"] == ["3 GB", "4 GB"]
    assert figures["iteration, planned"][0] == "–"
    assert main(["compare", "one"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "settings that differ" not in out
    assert "trajectories" not in out


def test_it_needs_no_torch(here: Path) -> None:
    code = (
        "import sys; from lt_offload.cli.main import main; code = main(['compare', 'one', 'two']);"
        "print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
