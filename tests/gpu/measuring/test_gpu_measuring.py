"""What is measured and asked of a GPU and its driver before anything is planned."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pynvml
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import lt_offload
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.machine import dispatch, driver, forked, pinning, zero_copy
from lt_offload.machine.accounting import Account
from lt_offload.machine.host_memory import LARGE_BYTES, HostMemory
from lt_offload.machine.numa import memory_node_of
from lt_offload.machine.pages import map_pages
from lt_offload.machine.staging import BUFFER_BYTES, STAGING_BYTES, Staging
from lt_offload.profiling import contention, hardware, host_reads, measure, rates
from lt_offload.profiling.meters import Stopwatch, Watch
from lt_offload.profiling.optimizer import measure_optimizer
from lt_offload.schema.profile import Profile
from lt_offload.session import offloaded
from tests.gpu.target import Target
from tests.support import models, trainers

pytestmark = pytest.mark.only("cuda")

MIB = 1 << 20


@pytest.fixture
def device(target: Target) -> Iterator[torch.device]:
    gc.collect()
    torch.cuda.empty_cache()
    yield target.torch_device
    torch.cuda.synchronize()


@pytest.fixture
def short(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times mean nothing, copies may be short."""
    if not target.real:
        monkeypatch.setattr(rates, "_COPY_BYTES", 4 * MIB)
        monkeypatch.setattr(contention, "_COPY_BYTES", 4 * MIB)
        monkeypatch.setattr(contention, "_ROUNDS", (1, 1))
        monkeypatch.setattr(zero_copy, "_SPEED_BYTES", 4 * MIB)
        monkeypatch.setattr(zero_copy, "LEAST_SPEED", 0.0)


@pytest.fixture
def occupied(target: Target) -> Iterator[Callable[[int], None]]:
    """Lets others have some of the device; on a real one nobody can be asked to."""
    if target.kind != "fake":
        pytest.skip("others on a GPU are not ours")
    from tests.fake_cuda import runtime

    yield runtime.occupy
    runtime.occupy(0)


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


@pytest.mark.parametrize("missing", [False, True], ids=["refused", "older torch"])
def test_a_driver_that_does_not_map_pages_keeps_segments_of_fixed_size(
    missing: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(_device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(driver, "_try_allocator", refuse)
    if missing:
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    else:
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    assert not driver.use_expandable_segments(device)
    assert asked == ([] if missing else ["expandable_segments:True", "expandable_segments:False"])


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
    assert driver.device_for(None) == driver.device_for("cuda") == device
    assert driver.device_for("cpu").type == "cpu"
    with driver.current(device):
        assert torch.cuda.current_device() == device.index


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
    speeds = zero_copy.measure_speeds(device, partial(torch.cuda.synchronize, device), view_of)
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


def test_the_memory_node(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # an older torch does not say where on the bus a GPU is
        patch.setattr(torch.cuda, "get_device_properties", lambda device: object())
        assert memory_node_of(device).about
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


# -- measurements ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("pinned", [True, False])
def test_links(pinned: bool, device: torch.device, found: Callable[..., None]) -> None:
    links = rates.measure_links(device, pinned=pinned, node=memory_node_of(device))
    found(h2d=links.h2d_alone, d2h=links.d2h_alone, staged=links.staged)
    assert min(links.h2d_alone, links.d2h_alone, links.h2d, links.d2h, links.staged) > 1e6


@pytest.mark.usefixtures("short")
def test_a_machine(target: Target, device: torch.device) -> None:
    said: list[str] = []
    machine = hardware.measure_machine(device, on_progress=said.append)
    assert machine.name == torch.cuda.get_device_name(device)
    assert machine.device_bytes == torch.cuda.get_device_properties(device).total_memory
    assert machine.context_bytes == pytest.approx(driver.context_bytes(device), rel=0.02)
    assert 0 < machine.pinnable_bytes <= machine.host_bytes <= hardware.total_host_bytes()
    assert set(machine.flops_per_s) == {"float32", "bfloat16"}
    assert min(machine.device_memory_bytes_per_s, machine.host_memory_bytes_per_s, machine.staged_bytes_per_s) > 0
    assert "page-locked memory" in machine.source
    assert said == ["measuring copies between host and device", "measuring matrix products", "measuring memory"]
    if target.real:
        assert machine.flops_per_s["bfloat16"] > machine.flops_per_s["float32"] > 1e11
        assert machine.device_memory_bytes_per_s > machine.host_memory_bytes_per_s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_long_enough_to_be_timed(dtype: torch.dtype, device: torch.device) -> None:
    size = rates.product_size(dtype, device)
    assert rates._LEAST <= size <= rates._MOST
    a = torch.ones(size, size, dtype=dtype, device=device)
    watch = Stopwatch(device)
    laps = []
    for _ in range(3):
        watch.lap()
        a @ a
        laps.append(watch.lap())
    assert size == rates._MOST or max(lap.seconds for lap in laps) > rates._LONG_ENOUGH / 2
    assert all(0 < lap.launch_s <= lap.seconds for lap in laps)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("most", [0, 8 * MIB, 140 * MIB], ids=["nothing", "a little", "not enough"])
def test_a_machine_that_locks_little_memory_is_measured(
    most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, for example; copies are slower then, and plans know how much."""
    locked: dict[int, int] = {}
    register, unregister = zero_copy.register, zero_copy.unregister

    def limited(address: int, nbytes: int) -> int:
        if sum(locked.values()) + nbytes > most:
            return 2
        locked[address] = nbytes
        return register(address, nbytes)

    def freed(address: int) -> int:
        locked.pop(address, None)
        return unregister(address)

    monkeypatch.setattr(rates, "_COPY_BYTES", 64 * MIB)
    monkeypatch.setattr(rates, "_STREAM_REPEATS", 2)
    monkeypatch.setattr(rates, "_THREAD_REPEATS", 1)
    monkeypatch.setattr(zero_copy, "register", limited)
    monkeypatch.setattr(zero_copy, "unregister", freed)
    monkeypatch.setattr(measure, "measure_hardware", hardware.measure_hardware)
    monkeypatch.setattr(measure, "measure_contention", contention.measure_contention)
    profile = profiled(*tiny_model(), device)
    assert profile.hardware.pinnable_bytes <= most
    assert min(profile.hardware.h2d_bytes_per_s, profile.hardware.staged_bytes_per_s) > 1e6
    assert profile.contention.slowdowns
    assert locked == {}


@pytest.mark.usefixtures("short")
def test_what_lanes_share(target: Target, device: torch.device) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(64, 64))])
    found = contention.measure_contention(optimizer, device, host_threads=1)
    assert {(s.lane, s.beside) for s in found.slowdowns} == {
        (lane, tuple(other for other in lanes if other != lane)) for lanes in contention.SETS for lane in lanes
    }
    assert all(0 <= found.of(lane) <= 1 for lane in contention.SHARING)
    if target.real:
        assert found.compute < 0.5, "computations of a GPU hardly use the host's memory"


def test_updates_on_either_side(device: torch.device) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(256, 256))], fused=False, foreach=True)
    before = torch.cuda.memory_allocated(device)
    found = measure_optimizer(optimizer, device)
    assert min(found.host_bytes_per_s, found.device_bytes_per_s) > 0
    assert found.host_speeds[found.host_threads] == found.host_bytes_per_s
    assert 0 < found.scratch_ratio < 8
    assert torch.cuda.memory_allocated(device) == before


def test_device_memory_of_a_phase(device: torch.device) -> None:
    watch = Watch(device)
    with watch:
        kept = torch.ones(8 * MIB, dtype=torch.uint8, device=device)
        passing = torch.ones(4 * MIB, dtype=torch.uint8, device=device)
        del passing
    assert watch.current == 8 * MIB
    assert 12 * MIB <= watch.peak() <= 14 * MIB
    with watch:
        gradient = torch.ones(2 * MIB, dtype=torch.uint8, device=device)
        watch.leave_out(gradient)
    assert watch.peak() < watch.whole_peak() == watch.held_peak()
    assert watch.slack >= 0
    del kept, gradient


def test_an_account_of_the_device_counts_nothing_of_the_host(device: torch.device) -> None:
    with Account(device_type="cuda") as account:
        there, here = torch.ones(1000, device=device), torch.ones(5000)
        view = there[5:]
        out = dispatch._empty_strided_on("cuda")((10,), (1,), torch.float32)  # as compiled code allocates
    assert account.current == 4000 + 40
    del there, view, here, out
    assert account.current == 0


def test_no_tensor_leaves_a_forked_process_on_the_device(device: torch.device) -> None:
    outcome, why = pickle.loads(forked._answer(lambda: {"x": torch.zeros(2, device=device)}))
    assert outcome == "failed"
    assert "tensor on cuda" in why

    def fails() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    assert pickle.loads(forked._answer(fails))[0] == "failed"


# -- profiles --------------------------------------------------------------------------------------------------------


def tiny_model(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build("llama-tied", **options)
    return model, torch.optim.AdamW(model.parameters())


def profiled(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any) -> Profile:
    return lt_offload.profile(model, models.batch(model), optimizer=optimizer, device=device, **options)


@pytest.mark.usefixtures("short")
def test_a_profile_leaves_no_trace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_hardware", hardware.measure_hardware)
    monkeypatch.setattr(measure, "measure_contention", contention.measure_contention)
    model, optimizer = tiny_model()
    weights = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    torch.manual_seed(3)
    torch.cuda.manual_seed(4)
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    driver.warm_up(device)
    before = torch.cuda.memory_allocated(device)
    profile = profiled(model, optimizer, device)
    gc.collect()
    assert torch.cuda.memory_allocated(device) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(device), states[1])
    for parameter, address, value in weights:
        assert parameter.data_ptr() == address
        assert parameter.grad is None
        assert torch.equal(parameter, value)
    assert not profile.estimated
    assert profile.slack_share == measure.ALLOCATOR_SLACK
    assert profile.page_table_bytes > 0
    assert profile.contention.slowdowns
    assert profile.hardware.context_bytes >= driver.beside_bytes(device)[0] * 0.9
    machine = profile.hardware
    assert (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s) == (
        machine.h2d_alone_bytes_per_s,
        machine.d2h_alone_bytes_per_s,
    )
    assert [t.name for t in profile.tensors if t.zero_copy is None] == []
    assert all(block.launch_s > 0 for block in profile.blocks)


def test_sizes_are_those_of_the_emulated_device(device: torch.device) -> None:
    """Kernels of the device may take something beside; what is saved and what travels are the model's."""
    found = [profiled(*tiny_model(), where) for where in (device, torch.device("cpu"))]
    for ours, theirs in zip(*(profile.blocks for profile in found), strict=True):
        assert (ours.input_bytes, ours.output_bytes) == (theirs.input_bytes, theirs.output_bytes)
        assert [option.name for option in ours.options] == [option.name for option in theirs.options]
        assert ours.option("recompute" if ours.kind == "layer" else "keep").saved_bytes == (
            theirs.option("recompute" if theirs.kind == "layer" else "keep").saved_bytes
        )
    assert not any(block.graphed for profile in found for block in profile.blocks)


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(x, 0.2, self.training)
        return x + (y.transpose(0, 1) @ (self.linear.weight * 2)).transpose(0, 1)


class ByMode(ComputedWeight):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.dropout(x, 0.2, self.training))
        return x + out + (0.0 if torch.is_grad_enabled() else 1e-3)


class Same(ComputedWeight):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.dropout(x, 0.2, self.training))
        return x + out


@pytest.mark.parametrize("layer", [ComputedWeight, ByMode, Same])
def test_blocks_that_differ_without_gradients_are_found_without_deterministic_algorithms(
    layer: type[nn.Module], device: torch.device
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
            self.layers = nn.ModuleList(layer() for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for each in self.layers:
                x = each(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    assert not torch.are_deterministic_algorithms_enabled()
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = lt_offload.profile(model, (torch.arange(12).view(2, 6),), optimizer=optimizer, device=device)
    differs = layer is not Same
    for block in profile.blocks[1:-1]:
        assert block.graphed is differs
        assert ("mixed" in {option.name for option in block.options}) is not differs


def test_a_device_that_cannot_read_host_memory_has_no_figures_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: Tensor, device: torch.device) -> Tensor:
        raise UnsupportedError("the driver does not map this memory")

    monkeypatch.setattr(host_reads, "zero_copy_view", refuse)
    said: list[str] = []
    profile = profiled(*tiny_model(), device, on_progress=said.append)
    assert all(tensor.zero_copy is None for tensor in profile.tensors)
    assert any("weights cannot be read in host memory: the driver does not map" in line for line in said)
