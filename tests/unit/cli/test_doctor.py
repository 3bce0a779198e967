"""What ``lt-finetune doctor`` says about memory that can be pinned, and about the system around a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lt_offload.cli.verbs import doctor
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.profile import HardwareProfile


@pytest.fixture
def machine() -> HardwareProfile:
    return replace(load_hardware("rtx-3070,ram=48GB"), staged_bytes_per_s=5.5e9, source="measured")


def said(machine: HardwareProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(doctor, "measure_machine", lambda **_: machine)
    doctor.doctor()
    return " ".join(capsys.readouterr().out.split())


def test_a_machine_without_limits(
    machine: HardwareProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(machine, monkeypatch, capsys)
    assert "Source: measured." in text
    assert "can be pinned" not in text


@pytest.mark.parametrize(("nbytes", "message"), [(0, "Only 0 B of RAM"), (10**9, "Only 1 GB of RAM")])
def test_a_limit_comes_with_a_way_out(
    machine: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nbytes: int,
    message: str,
) -> None:
    monkeypatch.setattr(doctor, "advice", lambda: "raise it")
    text = said(replace(machine, pinnable_bytes=nbytes), monkeypatch, capsys)
    assert f"{message} can be pinned" in text
    assert "To pin more: raise it." in text


def test_the_speed_of_memory_that_is_not_pinned(machine: HardwareProfile) -> None:
    assert dict(doctor.rows(machine))["RAM that is not pinned, either way"] == "5.5 GB/s"
    assert "RAM that is not pinned, either way" not in dict(doctor.rows(replace(machine, staged_bytes_per_s=0.0)))


@pytest.mark.parametrize(("limit", "text"), [(None, "none"), (8_000_000, "8 MB")])
def test_surroundings(monkeypatch: pytest.MonkeyPatch, limit: int | None, text: str) -> None:
    monkeypatch.setattr(doctor, "memlock_bytes", lambda: limit)
    monkeypatch.setattr(doctor, "is_wsl2", lambda: True)
    found = dict(doctor.surroundings(torch.device("cpu")))
    assert found["limit on locked memory (ulimit -l)"] == text
    assert found["memory node (NUMA)"] == "no GPU"
    assert " in WSL2 " in found["system"]
