"""The program behind ``make gpu``: parts that fail, hang or leave nothing do not keep the next from running."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    found = gpu.run(part(gpu, "print('so far'); raise SystemExit(3)"), 1200.0, log)
    assert found["status"] == "exit code 3"
    assert "so far" in capsys.readouterr().out
    assert "so far" in log.read_text()


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
