"""Device memory as the tests for GPUs read it, with NVML replaced: nothing they do may make a CUDA context."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from tests.gpu import target


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two GPUs; ``processes`` are those that NVML shows, which may hide them all."""
    library = SimpleNamespace(processes=[], used={0: 700, "GPU-b": 900}, asked=[])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: pytest.fail("a CUDA context"), raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: library.processes)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=library.used[handle], free=1, total=2)
    )
    return library


def test_a_process_that_nvml_shows_is_counted_alone(nvml: Any) -> None:
    nvml.processes = [SimpleNamespace(pid=1, usedGpuMemory=600), SimpleNamespace(pid=os.getpid(), usedGpuMemory=100)]
    assert target.used_by_driver() == (100, "process")


@pytest.mark.parametrize("processes", [[], [(1, 600)], [(os.getpid(), None)]])
def test_where_processes_are_hidden_everybody_is_counted_and_no_context_made(nvml: Any, processes: Any) -> None:
    """A context in the parent would be counted as the child's."""
    nvml.processes = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
    assert target.used_by_driver() == (700, "everybody (the process is not listed)")
    assert target.used_by_all() == 700


def test_the_first_visible_gpu_counts(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,0")
    assert target.used_by_all() == 900
