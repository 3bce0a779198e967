"""What a GPU, its driver and its memory may refuse, and what the device does then: each in one sentence, by name."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lt_offload.errors import ConfigError, OverBudget, UnsupportedError
from lt_offload.execute.device.cuda import CudaDevice
from lt_offload.execute.device.cuda_runtime import CudaRuntime
from lt_offload.machine import pinning, zero_copy
from lt_offload.machine.host_memory import LARGE_BYTES, HostMemory
from lt_offload.profiling import rates
from tests.gpu.target import Target

pytestmark = pytest.mark.only("cuda")

MB = 1 << 20


@contextmanager
def opened(budget: int) -> Iterator[CudaDevice]:
    device = CudaDevice(budget)
    try:
        yield device
    finally:
        device.close()
        device.close()  # a second time does nothing


def context() -> int:
    return CudaRuntime(0).context_bytes()[0]


def taken() -> int:
    """What an open device begins with: the context, and the workspaces of libraries in torch's allocator."""
    CudaDevice(8 << 30).close()
    torch.cuda.empty_cache()
    return context() + torch.cuda.memory_reserved()


# -- the budget --------------------------------------------------------------------------------------------------------


def test_a_budget_within_the_context() -> None:
    CudaDevice(1 << 30).close()  # so that the context is there
    with pytest.raises(ConfigError, match="is not more than the CUDA context alone occupies"):
        CudaDevice(context() // 2)


def test_a_budget_that_others_have_a_part_of() -> None:
    _, total = torch.cuda.mem_get_info()
    held = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    with pytest.raises(OverBudget, match="that are free on cuda:0"):
        CudaDevice(2 * total)
    del held


def test_an_arena_that_is_larger_than_the_budget() -> None:
    with opened(taken() + 200 * MB) as device:
        with pytest.raises(OverBudget, match="exceed the budget of"):
            device.reserve(device.budget - context() + MB)
        device.reserve(100 * MB)


def test_an_arena_beside_tensors_of_the_users() -> None:
    with opened(taken() + 200 * MB) as device:
        held = torch.empty(150 * MB, dtype=torch.uint8, device="cuda")
        with pytest.raises(OverBudget, match="does not fit"):
            device.reserve(100 * MB)
        del held
        device.reserve(100 * MB)


def test_a_context_that_grows_takes_what_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(taken() + 200 * MB) as device:
        del device._arena
        torch.empty(150 * MB, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_reserved()
        grown = context() + 100 * MB
        monkeypatch.setattr(CudaRuntime, "context_bytes", lambda cuda: (grown, True))
        with device.accounting("another batch"):
            pass
        assert torch.cuda.memory_reserved() < before
        device._arena = device._new_arena(0)


def test_others_memory_is_not_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver does not tell processes apart, what grows may be somebody else's."""
    with opened(taken() + 200 * MB) as device:
        found = device._context.nbytes
        monkeypatch.setattr(CudaRuntime, "context_bytes", lambda cuda: (found + 500 * MB, False))
        device.end_iteration()
        assert device._context.nbytes < found + MB


def test_what_a_plan_expects_the_context_to_take_is_left_to_it() -> None:
    with opened(taken() + 200 * MB) as device:
        torch.empty(150 * MB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        device.expect(context() + torch.cuda.memory_reserved() + 100 * MB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(150 * MB, dtype=torch.uint8, device="cuda")
        device.expect(0)  # of an engine without a plan, which knows nothing better
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(150 * MB, dtype=torch.uint8, device="cuda")


# -- host memory -------------------------------------------------------------------------------------------------------


def test_where_nothing_has_to_be_locked_tensors_stay_where_they_are() -> None:
    memory, tensor = HostMemory(), torch.ones(1000)
    assert memory.adopt(tensor) is tensor
    assert memory.nbytes == tensor.nbytes
    memory.close()


def test_memory_that_cannot_be_locked_is_copied_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, register, calls = taken() + 200 * MB, zero_copy.register, iter(range(100))
    # The first is the staging ring's.
    monkeypatch.setattr(zero_copy, "register", lambda *memory: register(*memory) if next(calls) == 0 else 2)
    with opened(budget) as device:
        device.reserve(MB)
        here = [device.host_empty((1000,), torch.float32).fill_(index) for index in range(3)]
        there = [device.place(index * 4096, 4000).view(torch.float32, (1000,)) for index in range(3)]
        device.synchronize(device.submit("h2d", lambda: device.copy_all(there, here)))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
        back = [device.host_empty((1000,), torch.float32) for _ in here]
        device.synchronize(device.submit("d2h", lambda: device.copy_all(back, there)))
        assert all(map(torch.equal, here, back))
        with pytest.raises(UnsupportedError, match="cannot compute in host memory that is not page-locked"):
            device.zero_copy_view(here[0])
        device.drain()
        asked = next(calls)
        for _ in range(2):  # nobody asks for as much a second time; what nobody uses goes back before there is more
            large = device.host_empty((LARGE_BYTES // 4,), torch.float32)
            assert device._host.is_pageable(large)
            del large
        assert next(calls) == asked + 2


def test_a_driver_that_does_not_map_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(cuda: CudaRuntime, host: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError("not on this machine")

    monkeypatch.setattr(CudaRuntime, "zero_copy_view", refuses)
    with opened(taken() + 200 * MB) as device:
        host = device.host_empty((10,), torch.float32)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="cannot compute in host memory: not on this machine"):
                device.zero_copy_view(host)


LIES = {
    "kernels read something else there": lambda seen: torch.zeros_like(seen),
    "the host reads something else there": lambda seen: seen.clone(),
    "an embedding reads something else": lambda seen: seen if seen.dtype == torch.int32 else torch.zeros_like(seen),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_driver_that_lies(lie: str, target: Target) -> None:
    device, probe = target.torch_device, torch.empty(1024, dtype=torch.int32)
    with zero_copy.locked(probe):
        views = lambda host: LIES[lie](zero_copy.zero_copy_view(host, device))  # noqa: E731
        assert lie in zero_copy.refusal(views, probe, torch.cuda.synchronize)


def test_reads_that_are_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "LEAST_SPEED", 0.5)
    assert "less than 50%" in rates.DirectSpeeds(copy_in=10e9, read=4e9, write=1e9).too_slow
    assert rates.DirectSpeeds(copy_in=10e9, read=6e9, write=1e9).too_slow == ""


def test_empty_tensors_and_threads(caplog: pytest.LogCaptureFixture) -> None:
    host = HostMemory(zero_copy.register, lambda address: zero_copy.unregister(address) or 7)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tensor = host.empty((3, 5), torch.float32)
    finally:
        torch.set_num_threads(before)
    assert not host.is_pageable(tensor)
    assert host.locked_bytes >= tensor.nbytes
    assert host.empty((0, 5), torch.float32).shape == (0, 5)
    assert [len(part) for part in host.group([((0,), torch.float32)])[1]] == [0]
    assert [math.prod(part.shape) for part in host.group([((0, 2), torch.float32), ((4,), torch.float32)])[1]] == [0, 4]
    with caplog.at_level(logging.WARNING):
        host.close()
    assert "cudaHostUnregister failed with error 7" in caplog.text


# -- limits of locked memory -------------------------------------------------------------------------------------------


def test_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert pinning.is_wsl2(tmp_path / "no such file") is False
    monkeypatch.setattr(pinning, "is_wsl2", lambda: True)
    assert ".wslconfig" in pinning.advice()
    monkeypatch.setattr(pinning, "is_wsl2", lambda: False)
    monkeypatch.setattr(pinning, "memlock_bytes", lambda: 8 * MB)
    assert "ulimit -l" in pinning.advice()
    monkeypatch.setattr(pinning, "memlock_bytes", lambda: None)
    assert "there is no limit" in pinning.advice()


def test_windows_refuses_to_lock_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "is_wsl2", lambda: True)
    monkeypatch.setattr(pinning, "_STEP_BYTES", 4 * MB)
    room = 10 * MB
    held: dict[int, int] = {}

    def register(address: int, nbytes: int) -> int:
        if sum(held.values()) + nbytes > room:
            return 2
        held[address] = nbytes
        return zero_copy.register(address, nbytes)

    def unregister(address: int) -> int:
        del held[address]
        return zero_copy.unregister(address)

    found = pinning.find_pin_limit(register, unregister, host_bytes=1 << 30)
    assert (found.nbytes, found.how) == (10 * MB, "WSL2 refused more")
    assert not held


@pytest.mark.parametrize("counts", [True, False])
def test_a_limit_of_the_system(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100 * MB, 100 * MB)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))

    def register(address: int, nbytes: int) -> int:
        return 2 if counts and nbytes > limits[-1][0] else zero_copy.register(address, nbytes)

    monkeypatch.setattr(pinning, "_TRIAL_BYTES", 128 * MB)
    found = pinning.find_pin_limit(register, zero_copy.unregister, host_bytes=1 << 30)
    assert found.nbytes == (100 * MB if counts else 1 << 30)
    assert ("(`ulimit -l`) counts" if counts else "does not count") in found.how
    assert [soft for soft, _ in limits] == [100 * MB, 64 * MB, 100 * MB], "lowered for a moment"
    monkeypatch.undo()


# -- small things ------------------------------------------------------------------------------------------------------


def test_tensors_that_are_made_in_inference_mode_may_be_in_graphs(target: Target) -> None:
    with opened(taken() + 200 * MB) as device:
        with torch.inference_mode():
            made = device.empty_all([((2, 3), torch.float32), ((4,), torch.bfloat16)])
        assert [tensor.is_inference() for tensor in made] == [False, False]
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in made] == [
            ((2, 3), torch.float32),
            ((4,), torch.bfloat16),
        ]
        state = device.rng_state()
        drawn = torch.rand(4), torch.rand(4, device=target.torch_device)
        device.set_rng_state(state)
        assert torch.equal(drawn[0], torch.rand(4))
        assert torch.equal(drawn[1], torch.rand(4, device=target.torch_device))


def test_a_device_knows_that_a_task_has_failed() -> None:
    def fail() -> None:
        raise KeyError("broken")

    with opened(taken() + 200 * MB) as device:
        assert not device.failed
        with pytest.raises(KeyError, match="broken"):
            device.wait(device.submit("host", fail))
        assert device.failed


def test_host_memory_is_computed_with_and_a_budget_that_is_used_up_is_said(target: Target) -> None:
    with opened(taken() + 200 * MB) as device:
        host = device.host_adopt(torch.arange(1024, dtype=torch.float32))

        def double() -> None:
            host.mul_(2)

        device.wait(device.submit("host", double))
        assert torch.equal(device.zero_copy_view(host).add(1).cpu(), torch.arange(1024).mul(2.0).add(1))
        with pytest.raises(OverBudget, match="is used up"), device.accounting():
            torch.empty(400 * MB, dtype=torch.uint8, device=target.torch_device)
