"""Device memory as the driver counts it, with NVML and torch's CUDA calls replaced."""

import os
from types import SimpleNamespace

import pynvml
import pytest
import torch

from lt_offload.machine import driver
from tests.support.gpu_model import Allocator

GPU = torch.device("cuda", 0)


class Nvml:
    """Stands in for the driver's library; ``processes`` are (pid, used bytes)."""

    def __init__(self, processes, uuid="GPU-12ab", installed=True):
        self.processes, self.uuid, self.installed, self.open = processes, uuid, installed, 0

    def init(self):
        if not self.installed:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def handle(self, uuid):
        if uuid != self.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 7

    def running(self, handle):
        assert handle == 7
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]


@pytest.fixture
def cuda(monkeypatch):
    """torch's figures: 1000 bytes reserved; of 5000 bytes, 2500 are in use by somebody."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2500, 5000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    monkeypatch.setattr(driver, "CONTEXT_LIMIT", 1200)


def nvml(monkeypatch, processes, **options):
    library = Nvml(processes, **options)
    driver._handle.cache_clear()
    monkeypatch.setattr(pynvml, "nvmlInit", library.init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", library.handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", library.running)
    return library


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([(os.getpid(), 1300), (os.getpid() + 1, 700)], (300, True)),  # others are not ours
        ([(os.getpid() + 1, 1300)], (300, True)),  # a container: this process has another number outside
        ([(os.getpid() + 1, 1300), (os.getpid() + 2, 700)], (1200, False)),  # which of them?
        ([(os.getpid(), None)], (1200, False)),
        ([], (1200, False)),
    ],
)
def test_memory_beside_the_allocator(cuda, monkeypatch, processes, expected):
    library = nvml(monkeypatch, processes)
    assert driver.beside_bytes(GPU) == expected
    assert driver.beside_bytes(GPU) == expected
    assert library.open == 1, "the library is opened once"


def test_what_everybody_has_is_the_limit_where_processes_are_not_told_apart(cuda, monkeypatch):
    nvml(monkeypatch, [(os.getpid(), 1300)], uuid="GPU-other")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3700, 5000))
    assert driver.beside_bytes(GPU) == (300, False)


def test_without_nvml(cuda, monkeypatch):
    nvml(monkeypatch, [], installed=False)
    assert driver.beside_bytes(GPU) == (1200, False)


def test_workspaces_are_what_goes_when_they_are_cleared(cuda, monkeypatch):
    held = {"bytes": 0}
    monkeypatch.setattr(driver, "warm_up", lambda device: held.update(bytes=64))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 + held["bytes"])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: held.update(bytes=0), raising=False)
    nvml(monkeypatch, [(os.getpid(), 1300)])
    assert driver.context_bytes(GPU) == 300 + 64
    assert held["bytes"] == 64


def test_warming_up_runs_the_usual_kernels_and_draws_no_random_numbers(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    state = torch.get_rng_state()
    with torch.inference_mode():
        driver.warm_up(torch.device("cpu"))
    assert waited == [torch.device("cpu")]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def allocator(monkeypatch):
    """torch's allocator, on a driver that maps memory page by page unless a test says otherwise."""
    found = Allocator()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(driver, "is_wsl2", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.set)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "another")
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    monkeypatch.setattr(torch.cuda, "empty_cache", found.empty_cache)
    monkeypatch.setattr(torch, "empty", found.empty)
    return found


def test_segments_are_made_expandable_unless_somebody_has_chosen(allocator, monkeypatch):
    assert driver.use_expandable_segments(GPU)
    assert allocator.settings == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False")
    assert not driver.use_expandable_segments(GPU)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert driver.use_expandable_segments(GPU)
    assert len(allocator.settings) == 1
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert driver.use_expandable_segments(GPU)
    assert allocator.settings[1:] == ["max_split_size_mb:64,expandable_segments:True"]


def test_segments_stay_as_they_are_where_pages_cannot_be_mapped(allocator, monkeypatch):
    monkeypatch.setattr(driver, "is_wsl2", lambda: True)
    assert not driver.use_expandable_segments(GPU)
    assert allocator.settings == []


def test_a_driver_that_refuses_expandable_segments_gets_the_others(allocator, monkeypatch):
    """It says so at the first allocation that needs a new segment, not when they are switched on."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    allocator.refuses = RuntimeError("CUDA driver error: operation not supported")
    assert not driver.use_expandable_segments(GPU)
    assert allocator.settings[-1] == "max_split_size_mb:64,expandable_segments:False"
    torch.empty(2 << 30)  # does not fail any more


def test_a_full_card_says_nothing_about_segments(allocator):
    allocator.refuses = torch.OutOfMemoryError("CUDA out of memory")
    assert driver.use_expandable_segments(GPU)
    assert allocator.expandable


def test_a_torch_without_the_setting_is_left_alone(allocator, monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    assert not driver.use_expandable_segments(GPU)


def test_what_can_be_occupied_counts_the_context_once(cuda, allocator, monkeypatch):
    """It is no longer free, and belongs to the budget: 2500 are free, 1000 torch has, 300 are its context."""
    warmed = []
    monkeypatch.setattr(driver, "warm_up", warmed.append)
    nvml(monkeypatch, [(os.getpid(), 1300)])
    assert driver.occupiable_bytes(GPU) == 2500 + 1000 + 300
    assert warmed == [GPU]


def test_page_tables_take_eight_bytes_per_page():
    assert driver.page_table_bytes(100 << 30) == 200 << 20
    assert driver.page_table_bytes(1) == 1


def test_what_is_measured_is_as_large_as_there_is_room(monkeypatch):
    cleared, tried = [], []
    monkeypatch.setattr(driver, "clear_cublas_workspaces", lambda: cleared.append(len(tried)))

    def measure(size):
        tried.append(size)
        if size > 30:
            raise torch.OutOfMemoryError("no room")
        return -size

    assert driver.in_what_room(measure, 20, least=1) == -20
    assert driver.in_what_room(measure, 100, least=1) == -25
    assert tried == [20, 100, 50, 25]
    assert cleared == [2, 3]
    with pytest.raises(torch.OutOfMemoryError):
        driver.in_what_room(measure, 100, least=26)
    assert tried[4:] == [100, 50]
