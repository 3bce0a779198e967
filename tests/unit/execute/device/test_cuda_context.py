"""How the CUDA context and torch's allocator share the budget. On a model of CUDA."""

import pytest
import torch

from lt_offload.errors import ConfigError, OverBudget
from lt_offload.execute.device.base import AllocatorEvents
from lt_offload.execute.device.cuda import CudaDevice
from lt_offload.execute.device.record import Recorder
from tests.support.gpu_model import CONTEXT, KB, Gpu

MB = 1 << 20
BUDGET = 1 << 20


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def opened():
    """What opens a device, and closes it in the end."""
    devices = []

    def open_(gpu, budget=BUDGET, **options):
        devices.append(CudaDevice(budget, runtime=gpu, **options))
        return devices[-1]

    yield open_
    for device in devices:
        device.close()


def test_a_context_that_grows_takes_from_the_allocator(opened, gpu):
    device = opened(gpu)
    gpu.context = CONTEXT + 50 * KB
    with device.accounting("shape"):
        pass
    assert gpu.limit == BUDGET - CONTEXT - 50 * KB
    assert device.memory() == CONTEXT + 50 * KB
    gpu.context = CONTEXT + 60 * KB
    with device.accounting("shape"):  # nothing new is expected of the same shape
        pass
    assert device.memory() == CONTEXT + 50 * KB


def test_a_context_that_shrinks_gives_nothing_away(opened, gpu):
    device = opened(gpu)
    gpu.context = CONTEXT - 50 * KB
    device.end_iteration()
    assert gpu.limit == BUDGET - CONTEXT


def test_what_may_belong_to_others_is_not_taken_for_a_context_that_grows(opened, gpu):
    gpu.exact = False
    device = opened(gpu)
    device.end_iteration()
    before = gpu.limit
    gpu.others = 50 * KB
    device.end_iteration()
    with device.accounting("shape"):
        pass
    assert gpu.limit == before


@pytest.mark.parametrize("exact", [True, False])
def test_page_tables_of_registered_memory_are_left_out_of_the_arena(opened, gpu, exact):
    """They are known even where NVML does not show this process's memory, as in most containers."""
    gpu.exact, gpu.page_tables, gpu.others = exact, True, 30 * KB
    before = CONTEXT + (0 if exact else 30 * KB)
    device = opened(gpu, 900 * KB)
    host = device.host_empty((96 * MB,), torch.uint8)
    tables = sum(gpu.registered.values()) // 512
    assert host.nbytes // 512 == 192 * KB <= tables
    room = 900 * KB - before - tables
    with pytest.raises(OverBudget, match="exceed the budget"):
        device.reserve(room + 1)
    assert gpu.limit == room
    device.reserve(room)
    assert device.memory() == 900 * KB


def test_memory_that_is_registered_later_is_followed_without_a_new_shape(opened, gpu):
    """Plain loops: one ``accounting`` around all of training."""
    gpu.page_tables = True
    device = opened(gpu)
    device.reserve(64 * KB)
    with device.accounting():
        host = device.host_empty((32 * MB,), torch.uint8)
        assert gpu.limit == BUDGET - CONTEXT - sum(gpu.registered.values()) // 512 + host.nbytes // 512
        device.end_iteration()
        assert gpu.limit == BUDGET - CONTEXT - sum(gpu.registered.values()) // 512


def test_the_driver_is_asked_less_and_less_often(opened, gpu):
    device = opened(gpu)
    asked = []
    for _ in range(40):
        before = gpu.asked
        device.end_iteration()
        asked.append(gpu.asked - before)
    assert [i + 1 for i, times in enumerate(asked) if times] == [1, 2, 3, 4, 8, 16, 32]


def test_following_waits_for_nothing(opened, gpu):
    device = opened(gpu)
    log = []
    gpu.launch(lambda: log.append("kernel"))
    gpu.context = CONTEXT + 50 * KB
    device.end_iteration()
    assert gpu.limit == BUDGET - CONTEXT - 50 * KB
    assert log == []


def test_what_the_allocator_has_already_is_taken_back(opened, gpu):
    device = opened(gpu)
    device.reserve(600 * KB)
    gpu.cached = 200 * KB
    device.end_iteration()
    assert gpu.emptied == 0
    gpu.context = CONTEXT + 150 * KB
    device.end_iteration()
    assert gpu.emptied == 1
    assert device.memory() == 600 * KB + CONTEXT + 150 * KB


def test_what_was_planned_for_the_context_is_left_to_it_from_the_beginning(opened, gpu):
    """A process that replays a plan has loaded fewer kernels than the one that measured. Workspaces are allocated."""
    gpu.workspaces = 16 * KB
    device = opened(gpu, context=CONTEXT + 80 * KB)
    assert gpu.limit == BUDGET - CONTEXT - 64 * KB
    assert device.memory() == CONTEXT
    gpu.context = CONTEXT + 64 * KB
    device.end_iteration()
    assert gpu.limit == BUDGET - CONTEXT - 64 * KB
    gpu.context = CONTEXT + 70 * KB
    device.end_iteration()
    assert gpu.limit == BUDGET - CONTEXT - 70 * KB


def test_a_plan_that_expected_less_than_there_is_changes_nothing(opened, gpu):
    gpu.workspaces = 16 * KB
    opened(gpu, context=10 * KB)
    assert gpu.limit == BUDGET - CONTEXT


def test_impossible_budgets_are_refused(gpu):
    with pytest.raises(ConfigError, match=r"memory=102 kB is not more than the CUDA context alone occupies \(102 kB\)"):
        CudaDevice(CONTEXT, runtime=gpu)
    with pytest.raises(OverBudget, match=r"memory=2 MB is more than the 1.15 MB that are free on cpu"):
        CudaDevice(2_000_000, runtime=gpu)


def test_what_the_allocator_did_in_an_iteration_is_recorded(opened, gpu):
    device = opened(gpu)
    recorder = Recorder(device)
    gpu.events_of_allocator = AllocatorEvents(2, 3, 0)
    recorder.begin()
    gpu.events_of_allocator = AllocatorEvents(3, 10, 1)
    recorder.end()
    assert recorder.allocator == AllocatorEvents(retries=1, frees=7, failures=1)
    recorder.begin()
    recorder.end()
    assert recorder.allocator == AllocatorEvents(0, 0, 0)
