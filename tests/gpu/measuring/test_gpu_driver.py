"""What the driver and torch's allocator are asked, and host memory that a GPU reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from torch import Tensor

import lt_offload
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.machine import driver, pages, pinning, zero_copy
from lt_offload.machine.host_memory import LARGE_BYTES, HostMemory
from lt_offload.machine.numa import memory_node_of
from lt_offload.machine.pages import map_pages
from lt_offload.machine.staging import BUFFER_BYTES, STAGING_BYTES, Staging
from lt_offload.profiling import hardware, rates
from lt_offload.session import offloaded
from tests.gpu.measuring.tiny import MIB, tiny_model
from tests.gpu.target import Target
from tests.support import models, trainers

pytestmark = pytest.mark.only("cuda")


# -- the driver and the allocator ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "expandable"),
    [
        ("", True),
        ("max_split_size_mb:512", True),
        ("expandable_segments:True", True),
        ("expandable_segments: True,max_split_size_mb:512", True),
        ("expandable_segments:False", False),
        ("backend:cudaMallocAsync", False),
    ],
)
def test_what_a_user_has_configured_is_left_alone(
    configured: str, expandable: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    settings: Any = torch._C._accelerator_setAllocatorSettings

    def noted(text: str) -> None:
        asked.append(text)
        settings(text)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", noted)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", configured)
    assert driver.use_expandable_segments(device) is expandable
    theirs = "expandable" in configured or "backend" in configured
    assert asked == ([] if theirs else [",".join(filter(None, [configured, "expandable_segments:True"]))])
    assert float(torch.ones(MIB, device=device).sum()) == MIB


def test_a_driver_that_does_not_map_pages_keeps_segments_of_fixed_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(_device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(driver, "_try_allocator", refuse)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    assert not driver.use_expandable_segments(device)
    assert asked == ["expandable_segments:True", "expandable_segments:False"]


def test_a_refusal_of_the_driver_itself(target: Target, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if target.kind != "fake":
        pytest.skip("this driver maps pages")
    monkeypatch.setenv("FAKE_CUDA_EXPANDABLE", "0")
    assert not driver.use_expandable_segments(device)
    assert float(torch.ones(MIB, device=device).sum()) == MIB


def test_linux_within_windows_is_not_asked_to_map_pages(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "is_wsl2", lambda: True)
    assert not driver.use_expandable_segments(device)


def test_a_full_card_is_no_refusal(device: torch.device, occupied: Callable[[int], None]) -> None:
    occupied(torch.cuda.mem_get_info(device)[0])
    assert driver.use_expandable_segments(device)


def test_the_current_gpu_is_taken_where_none_is_named(device: torch.device) -> None:
    assert driver.find_device(None) == driver.find_device("cuda") == device
    assert driver.find_device("cpu").type == "cpu"
    with driver.current(device):
        assert torch.cuda.current_device() == device.index


def test_what_is_no_gpu_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="device='gpu' is not known; 'auto', 'cuda', 'cuda:1' and 'cpu' are"):
        driver.find_device("gpu")
    with pytest.raises(ConfigError, match=r"device='cuda:99': torch finds \d+ GPUs?, the first is cuda:0"):
        driver.find_device("cuda:99")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match="device='cuda': torch finds no GPU here; device='cpu' carries"):
            driver.find_device("cuda")


def test_the_context_is_the_same_whoever_asks_and_however_often(device: torch.device) -> None:
    first = driver.context_bytes(device)
    held = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    assert driver.context_bytes(device) == pytest.approx(first, rel=0.02)
    del held
    beside, exact = driver.beside_bytes(device)
    assert 0 < beside <= first
    assert exact or first <= driver.CONTEXT_LIMIT + 256 * MIB


@pytest.mark.parametrize("how", ["error", "nobody", "one other", "several others"])
def test_processes_that_the_driver_does_not_tell_apart(
    how: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        pid, usedGpuMemory = -1, 700 * MIB  # noqa: N815 - NVML's name

    def processes(_handle: object) -> list[Process]:
        if how == "error":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [Process()] * {"nobody": 0, "one other": 1, "several others": 2}[how]

    torch.cuda.empty_cache()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", processes)
    beside, exact = driver.beside_bytes(device)
    assert exact is (how == "one other")  # in a container, where this process has another number
    assert beside == 700 * MIB - torch.cuda.memory_reserved(device) if exact else 0 < beside <= driver.CONTEXT_LIMIT


def test_all_that_is_free_counts_once(device: torch.device) -> None:
    """The context is part of a budget: what is free, and what this process has already."""
    held = torch.ones(96 * MIB, dtype=torch.uint8, device=device)
    occupiable = driver.occupiable_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    assert occupiable == free + torch.cuda.memory_reserved(device) + driver.beside_bytes(device)[0]
    assert occupiable <= total
    left = hardware.free_memory(device)
    assert 0.99 * occupiable < left < occupiable
    del held


def test_a_budget_that_nobody_names_leaves_others_what_they_have(
    device: torch.device, occupied: Callable[[int], None]
) -> None:
    total = torch.cuda.mem_get_info(device)[1]
    assert driver.occupiable_bytes(device) == total
    occupied(total - 1500 * MIB)
    assert driver.occupiable_bytes(device) == 1500 * MIB
    model, optimizer = tiny_model()
    with offloaded(model, optimizer, models.batch(model), accelerator="cuda", host_update=False) as engine:
        assert engine.plan is not None
        assert engine.plan.budget_bytes == engine.device.budget == 1500 * MIB - 1500 * MIB // 256
        assert engine.device.memory() < engine.device.budget


def test_a_trainer_without_a_budget_has_all_that_is_free(device: torch.device, occupied: Callable[[int], None]) -> None:
    """The context counts once: it is in what is free, in the plan, and beside what the allocator may take."""
    from lightning.pytorch.callbacks import LambdaCallback

    total = torch.cuda.mem_get_info(device)[1]
    occupied(total - 1500 * MIB)
    seen: list[tuple[int, int]] = []
    strategy = lt_offload.OffmateStrategy(host_update=False, solver_time_limit=2.0)

    def look(*_: Any) -> None:
        assert strategy.engine is not None
        seen.append((strategy.engine.device.budget, torch.cuda.mem_get_info(device)[0]))

    callback = LambdaCallback(on_train_batch_end=look)
    trainers.fit(strategy, trainers.seeded_module(7), accelerator="cuda", devices=1, callbacks=[callback])
    assert strategy.plan is not None
    assert strategy.profile is not None
    budget, left = seen[-1]
    assert budget == strategy.plan.budget_bytes == 1500 * MIB - 1500 * MIB // 256
    assert left >= 1500 * MIB - budget
    assert strategy.plan.context_bytes >= strategy.profile.hardware.context_bytes > 0


def test_budgets_larger_than_the_card_are_refused(device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    hardware.check_memory(None, device)
    hardware.check_memory(total, device)
    with pytest.raises(ConfigError, match="the GPU has"):
        hardware.check_memory(total + 1, device)


# -- host memory -----------------------------------------------------------------------------------------------------


def test_kernels_read_and_write_host_memory(device: torch.device) -> None:
    view_of, synchronize = partial(zero_copy.zero_copy_view, device=device), partial(torch.cuda.synchronize, device)
    with zero_copy.locked(torch.empty(1024, dtype=torch.int32)) as probe:
        assert zero_copy.refusal(view_of, probe, synchronize) == ""
    with zero_copy.zero_copy_of(torch.arange(12, dtype=torch.bfloat16).view(3, 4), device) as seen:
        assert seen.device == device
        assert torch.equal((seen + 1).cpu(), torch.arange(1, 13, dtype=torch.bfloat16).view(3, 4))
    assert view_of(torch.empty(0, 3)).shape == (0, 3)


def test_memory_that_kernels_cannot_read_is_refused(device: torch.device) -> None:
    with pytest.raises(UnsupportedError, match="not page-locked"):
        zero_copy.zero_copy_view(map_pages(4096).bytes(), device)
    with pytest.raises(UnsupportedError, match="not contiguous"):
        zero_copy.zero_copy_view(torch.ones(4, 4).t(), device)
    float((torch.ones(4, device=device) * 2).sum())  # no error of the driver's is left for the next launch


def test_memory_is_not_shown_without_the_runtime_or_where_torch_copies(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zero_copy.locked(map_pages(4096).bytes()) as host:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "as_tensor", lambda memory, device: memory.host.to(device))
            with pytest.raises(UnsupportedError, match="torch copied the memory"):
                zero_copy.zero_copy_view(host, device)
        monkeypatch.setattr(torch.version, "cuda", "1.0")
        with pytest.raises(UnsupportedError, match="the CUDA runtime cannot be asked"):
            zero_copy.zero_copy_view(host, device)


def test_a_refused_registration_is_told_and_does_no_harm(device: torch.device) -> None:
    host = map_pages(MIB).bytes()
    with zero_copy.locked(host):
        assert zero_copy.register(host.data_ptr(), host.nbytes) != 0
        with pytest.raises(UnsupportedError, match="cannot be page-locked"), zero_copy.locked(host):
            pass
        assert float(torch.ones(4, device=device).sum()) == 4
    assert zero_copy.unregister(host.data_ptr()) != 0


@pytest.mark.usefixtures("short")
def test_the_speeds_of_host_memory(device: torch.device, found: Callable[..., None]) -> None:
    view_of = partial(zero_copy.zero_copy_view, device=device)
    speeds = rates.measure_direct(device, view_of)
    found(copy_in=speeds.copy_in, read=speeds.read, write=speeds.write)
    assert min(speeds.copy_in, speeds.read, speeds.write) > 1e6


def test_how_much_may_be_locked(device: torch.device) -> None:
    limit = pinning.find_pin_limit(zero_copy.register, zero_copy.unregister, host_bytes=256 * MIB)
    assert 0 < limit.nbytes <= 256 * MIB
    assert "locked" in limit.how or "counts" in limit.how
    registered: dict[int, int] = {}

    def register(address: int, nbytes: int) -> int:
        if sum(registered.values()) + nbytes > 8 * MIB:
            return 2
        registered[address] = nbytes
        return zero_copy.register(address, nbytes)

    def unregister(address: int) -> int:
        del registered[address]
        return zero_copy.unregister(address)

    nothing = pinning.find_pin_limit(register, unregister, host_bytes=1 << 40)
    assert nothing.nbytes <= (pinning.memlock_bytes() or 0)
    assert registered == {}


def test_linux_within_windows_is_asked_for_more_and_more(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "is_wsl2", lambda: True)
    monkeypatch.setattr(pinning, "_STEP_BYTES", 4 * MIB)
    limit = pinning.find_pin_limit(zero_copy.register, zero_copy.unregister, host_bytes=32 * MIB)
    assert limit.nbytes == 16 * MIB
    assert "16.8 MB were locked without a refusal" in limit.how


def test_registered_memory_goes_back_where_its_owner_says(device: torch.device) -> None:
    """While a kernel that was launched before may still be running."""
    calls: list[str] = []

    def unregister(address: int) -> int:
        calls.append(threading.current_thread().name)
        return zero_copy.unregister(address)

    with driver.current(device):
        memory = HostMemory(zero_copy.register, unregister)
        host = [memory.adopt(torch.full((LARGE_BYTES // 4,), float(i))) for i in range(3)]
        target = torch.zeros(LARGE_BYTES // 4, device=device)
        for tensor in host:
            target += tensor.to(device, non_blocking=True)
        worker = threading.Thread(target=host.clear)
        del tensor
        worker.start()
        worker.join()
        assert calls == []
        torch.cuda.synchronize(device)
        assert memory.locked_bytes == 0
        memory.close()
    assert calls == [threading.main_thread().name] * 3
    assert float(target[-1]) == 3.0


def test_page_tables_of_locked_memory_are_counted(target: Target, device: torch.device) -> None:
    assert driver.page_table_bytes(0) == 0
    assert driver.page_table_bytes(1 << 30) == 2 * MIB
    host = map_pages(512 * MIB if target.real else 64 * MIB).bytes()
    before, exact = driver.beside_bytes(device)
    with zero_copy.locked(host):
        after, _ = driver.beside_bytes(device)
    if exact:
        assert after - before <= driver.page_table_bytes(host.nbytes) + 4 * MIB


def test_the_memory_node(device: torch.device) -> None:
    node = memory_node_of(device)
    assert node.about
    done: list[int] = []
    node.run(lambda: done.append(torch.get_num_threads()))
    assert len(done) == 1


@pytest.mark.parametrize("buffers", [True, False], ids=["with buffers", "by the driver"])
def test_staged_copies_arrive(buffers: bool, device: torch.device) -> None:
    memory = map_pages(STAGING_BYTES).bytes()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with zero_copy.locked(memory):
        staging = Staging(
            memory if buffers else None,
            event=partial(torch.cuda.Event, blocking=True),
            use=torch.cuda.stream,
            copy=partial(Tensor.copy_, non_blocking=True),
        )
        for count in (1, BUFFER_BYTES // 4 + 5, 5 * BUFFER_BYTES // 4):
            source = torch.arange(count, dtype=torch.float32)
            there, back = torch.empty(count, device=device), torch.empty(count)
            stream.wait_stream(torch.cuda.current_stream(device))
            staging.to_device(there, source, stream)
            with torch.cuda.stream(stream):
                there.mul_(2)
            staging.to_host(back, there, stream)
            assert torch.equal(back, source * 2)
        other = torch.zeros(7, 3, dtype=torch.bfloat16)
        source = torch.full((3, 7), 5.0, device=device).t()  # other numbers, in another order
        stream.wait_stream(torch.cuda.current_stream(device))
        staging.to_host(other, source, stream)
        assert (other == 5).all()
        torch.cuda.synchronize(device)


# -- pages of files ---------------------------------------------------------------------------------------------------


def test_weights_of_a_file_that_were_read_are_let_go_of(tmp_path: Path) -> None:
    numbers = torch.arange(1 << 20, dtype=torch.int32)
    torch.save({"some": numbers}, tmp_path / "weights.pt")
    found = torch.load(tmp_path / "weights.pt", mmap=True)["some"]
    assert torch.equal(found, numbers)
    for tensor in (found, numbers, found[:3], torch.empty(0)):  # in a file, in no file, less than a page, nothing
        pages.forget(tensor)
        assert torch.equal(tensor, numbers[: len(tensor)])
    pages.forget(torch.empty(1 << 20, device="meta"))  # at no address
