"""The program behind ``make gpu``: parts that fail, hang or leave nothing do not keep the next from running."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.docs import gpu_runs
from scripts.gpu import __main__ as program

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(program, "GRACE_S", 0.5)
    return program


def part(gpu: ModuleType, code: str, figures: Path | None = None) -> Any:
    return gpu.Part(name="one", command=["-c", code], minutes=1.0, figures=figures)


class Impatient(subprocess.Popen[bytes]):
    """Has no patience with what sleeps, once it has written the file ``awaited``, and waits for all else."""

    awaited: Path | None = None

    def wait(self, timeout: float | None = None) -> int:
        if "sleep" not in str(self.args) or timeout is None or timeout < LIMIT:
            return super().wait(timeout if timeout is None or timeout < LIMIT else None)
        while self.awaited is not None and not (self.awaited.exists() and self.awaited.read_text()):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


LIMIT = 100.0
"""Seconds that a part may take: more than the grace period of one that is ended."""


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_it_started(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setattr(Impatient, "awaited", pid)
    monkeypatch.setattr(gpu.subprocess, "Popen", Impatient)
    code = (
        "import pathlib, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    found = gpu.run(part(gpu, code), LIMIT, tmp_path / "log")
    assert found["status"] == "time limit"
    child = int(pid.read_text())
    for _ in range(100):
        try:
            os.kill(child, 0)
            if "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[:1]:
                break
        except (ProcessLookupError, FileNotFoundError):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child lives on")


def test_a_part_that_fails_shows_the_end_of_its_output(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    found = gpu.run(part(gpu, "print('so far'); raise SystemExit(3)"), 60.0, log)
    assert found["status"] == "exit code 3"
    assert "so far" in capsys.readouterr().out
    assert "so far" in log.read_text()


def test_outcomes_of_tests_are_kept(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = {
        "test_good": {"outcome": "passed", "seconds": 1.0, "message": ""},
        "test_bad": {"outcome": "failed", "seconds": 1.0, "message": "a\nE   assert 1 == 2"},
        "test_two": {"outcome": "skipped", "seconds": 0.0, "message": "this needs two GPUs"},
    }
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"tests": tests, "running": "test_hung", "figures": {"test_good": {"ratio": 1.5}}}))
    found = gpu.run(part(gpu, "pass", figures), 60.0, tmp_path / "log")
    assert found["passed"] == 1
    assert list(found["failures"]) == ["test_bad"]
    assert list(found["skipped"]) == ["test_two"]
    assert found["figures"] == {"test_good": {"ratio": 1.5}}
    out = capsys.readouterr().out
    assert "assert 1 == 2" in out
    assert "test_two was not run: this needs two GPUs" in out
    assert "ended in test_hung" in out
    assert gpu.run(part(gpu, "pass", tmp_path / "none"), 60.0, tmp_path / "log")["passed"] == 0


@pytest.mark.slow
def test_every_part_runs_and_the_file_says_how_it_ended(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = ["pass", "raise SystemExit(2)", "import time; time.sleep(600)", "pass"]
    made = [gpu.Part(name=str(i), command=["-c", code], minutes=LIMIT / 60) for i, code in enumerate(codes)]
    monkeypatch.setattr(gpu, "parts", lambda options, folder: made)
    monkeypatch.setattr(gpu, "in_child", lambda *args: {"torch": "1", "gpu": "some"})
    monkeypatch.setattr(gpu.subprocess, "Popen", Impatient)
    assert gpu.main(["--out", str(tmp_path), "--minutes", "60"]) == 1
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["status"] for one in written["figures"]["parts"]] == ["ok", "exit code 2", "time limit", "ok"]
    assert {"date", "machine", "versions"} <= written.keys()


def test_without_a_gpu_nothing_runs(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "in_child", lambda *args: {"torch": "1"})
    assert gpu.main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("no GPU")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_its_parts_are_programs_that_exist(gpu: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(device="cpu", tiny=False, parts=gpu.PARTS, out=tmp_path)
    made = gpu.parts(options, tmp_path)
    assert [one.name for one in made] == list(gpu.PARTS)
    for one in made:
        _, module, *rest = one.command
        assert importlib.util.find_spec(module) is not None
        assert module != "pytest" or (ROOT / rest[0]).exists()


def test_figures_of_the_first_minute_are_printed(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    stages = {"before": {"driver": 5, "nvml": 4}, "installed": {"driver": 9, "nvml": 8}}
    seen = {"stages": stages, "retries": [1, 0], "device_peak": {"predicted": 10, "measured": 9}}
    figures.write_text(json.dumps({"tests": {}, "running": "", "figures": {"test_where": seen}}))
    one = gpu.Part(name="first", command=["-c", "pass"], minutes=1.0, figures=figures, shown=True)
    gpu.run(one, 60.0, tmp_path / "log")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "stages before: driver 5, nvml 4" in lines
    assert "stages installed: driver 9, nvml 8" in lines
    assert "retries: [1, 0]" in lines
    assert "device_peak: predicted 10, measured 9" in lines


def test_budgets_are_tabled_beside_what_the_driver_showed() -> None:
    def run(*parts: dict[str, Any]) -> dict[str, Any]:
        machine = {"gpu": "GPU X", "processor": "CPU Y", "cores": 4}
        when = {"date": "2026-01-01", "commit": "abc1234"}
        return {"machine": machine, "versions": {"torch": "2.11"}, **when, "figures": {"parts": parts}}

    peak = {"budget": 2 * 10**9, "predicted": 19 * 10**8, "peak": 18 * 10**8}
    seconds = {"predicted_s": 0.5, "measured_s": 0.4}
    figures = {f"{gpu_runs.PEAK}[tight]": peak, f"{gpu_runs.TIME}[tight]": seconds}
    table = gpu_runs.table([run({"name": "smoke"}, {"name": "memory", "figures": figures}), run({"name": "cards"})])
    assert "| 2 GB | 1.9 GB | 1.8 GB | 500 ms | 400 ms |" in table
    assert "(GPU X, torch 2.11, 2026-01-01 at commit abc1234)" in table
    assert gpu_runs.table([]) == ""


def test_parts_that_may_run_beside_each_other_do(gpu: ModuleType) -> None:
    def one(name: str, beside: bool) -> Any:
        return gpu.Part(name=name, command=[], minutes=1.0, beside=beside)

    chosen = [one("a", False), one("b", True), one("c", True), one("d", False), one("e", True)]
    assert [[part.name for part in group] for group in gpu.groups(chosen)] == [["a"], ["b", "c"], ["d"], ["e"]]


def test_a_part_without_time_is_not_begun(gpu: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    log.write_bytes(b"")
    parts = [gpu.Part(name=name, command=["-c", f"print('{name} ran')"], minutes=1.0) for name in ("a", "b")]
    done = gpu.run_all(parts, lambda part: 60.0 if part.name == "a" else 0.0, log, tmp_path)
    assert [found["status"] for found in done] == ["ok", "no time left"]
    assert "a ran" in log.read_text()
