"""How little the CUDA device asks of CUDA, and what it does where memory cannot be page-locked. On a model of CUDA."""

import threading

import pytest
import torch

from lt_offload.errors import UnsupportedError
from lt_offload.execute.device.cuda import CudaDevice
from tests.support.gpu_model import KB, Gpu, Stream


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def device(gpu):
    device = CudaDevice(1 << 20, runtime=gpu)
    device.reserve(64 * KB)
    yield device
    device.close()


# -- events ----------------------------------------------------------------------------------------------------------


def test_events_are_used_again_when_nobody_refers_to_them(device, gpu):
    def step():
        buffer = device.place(0, KB)
        device.wait(device.submit("h2d", lambda: None, writes=[buffer]), writes=[buffer])
        device.free(buffer, [device.submit("d2h", lambda: None, after=[device.mark()])])

    for _ in range(5):
        step()
    made = gpu.events
    for _ in range(100):
        step()
    assert gpu.events == made


def test_an_event_that_somebody_refers_to_is_not_used_again(device, gpu):
    log = []
    first = device.submit("h2d", lambda: gpu.launch(lambda: log.append("first")))
    for _ in range(20):
        device.wait(device.submit("d2h", lambda: None))
    assert not first.done()
    device.synchronize(first)
    assert log == ["first"]


def test_what_is_ordered_already_needs_no_wait(device, gpu):
    log = []
    copies = [device.submit("h2d", lambda at=at: gpu.launch(lambda: log.append(at))) for at in range(3)]
    device.wait(copies[2])
    waits = gpu.waits
    device.wait(*copies)
    device.wait(device.mark())
    device.submit("h2d", lambda: None, after=[copies[0]])
    assert gpu.waits == waits
    marks = [device.mark(), device.mark()]
    device.submit("d2h", lambda: None, after=[marks[1]])
    out = device.submit("d2h", lambda: None, after=marks)
    assert gpu.waits == waits + 1
    device.synchronize(out)
    assert log == [0, 1, 2]


def test_another_stream_of_the_caller_is_ordered_for_itself(device, gpu):
    """What one stream has waited for says nothing about the next."""
    log = []
    copy = device.submit("h2d", lambda: gpu.launch(lambda: log.append("copy")))
    device.wait(copy)
    side = Stream(gpu, "side")
    with gpu.use(side):
        device.wait(copy)
        gpu.launch(lambda: log.append("kernel"))
        mark = device.mark()
    device.wait(mark)
    gpu.main.synchronize()
    assert log == ["copy", "kernel"]


# -- times -----------------------------------------------------------------------------------------------------------


def test_times_stay_precise_however_long_training_takes(gpu, monkeypatch):
    """CUDA tells milliseconds in single precision: after a day that would be steps of eight milliseconds."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    device = CudaDevice(1 << 20, runtime=gpu)
    for day in range(3):
        now[0] = day * 86400.0 + 1.0
        device.record(True)
        now[0] += 0.0011
        token = device.begin_compute(1, "forward")
        gpu.main.synchronize()
        now[0] += 0.0003
        device.end_compute(token)
        gpu.main.synchronize()
        ((_, _, _, start, end),) = device.take_spans()
        assert start == pytest.approx(day * 86400.0 + 1.0011, abs=1e-6)
        assert end - start == pytest.approx(0.0003, abs=1e-6)
    device.close()


def test_timing_events_are_used_again_and_only_made_while_recording(device, gpu):
    def step():
        device.end_compute(device.begin_compute(1, "forward"))
        device.synchronize(device.submit("h2d", lambda: None))
        gpu.main.synchronize()
        return device.take_spans()

    assert step() == []
    made = gpu.events
    device.record(True)
    assert len(step()) == 2
    assert gpu.events == made + 1 + 4
    for _ in range(10):
        step()
    assert gpu.events == made + 1 + 4


def test_restarting_the_clock_waits_for_nothing(device, gpu):
    log = []
    gpu.launch(lambda: log.append("kernel"))
    device.record(True)
    assert log == []


# -- memory that cannot be page-locked -------------------------------------------------------------------------------


@pytest.fixture
def pageable(gpu):
    """A device none of whose host memory could be page-locked."""
    gpu.locks = False
    device = CudaDevice(1 << 20, runtime=gpu)
    yield device
    device.close()


def test_copies_of_pageable_memory_run_on_the_lanes_thread(pageable, gpu):
    host = pageable.host_adopt(torch.arange(6.0))
    near, back = torch.zeros(6), pageable.host_empty((6,), torch.float32)
    where = []

    def copy(target, source):
        where.append((threading.current_thread().name, gpu.current_stream().name))
        pageable.copy(target, source)

    down = pageable.submit("h2d", lambda: copy(near, host))
    up = pageable.submit("d2h", lambda: copy(back, near), after=[down])
    pageable.wait(up)
    assert where == [("lt_offload h2d", "h2d"), ("lt_offload d2h", "d2h")]
    assert torch.equal(back, torch.arange(6.0))


@pytest.mark.parametrize("locks", [True, False])
def test_many_tensors_are_copied_at_once_also_where_memory_is_pageable(gpu, locks):
    gpu.locks = locks
    device = CudaDevice(1 << 20, runtime=gpu)
    hosts = [device.host_adopt(torch.full((count,), float(count))) for count in (3, 5, 7)]
    near = [torch.zeros(host.shape) for host in hosts]
    back = [device.host_empty(host.shape, torch.float32) for host in hosts]
    down = device.submit("h2d", lambda: device.copy_all(near, hosts))
    up = device.submit("d2h", lambda: device.copy_all(back, near), after=[down])
    device.synchronize(up)
    assert all(map(torch.equal, back, hosts))
    device.close()


def test_pageable_memory_is_never_shown_to_kernels(pageable, gpu):
    host = pageable.host_adopt(torch.arange(6.0))
    with pytest.raises(UnsupportedError, match="not page-locked"):
        pageable.zero_copy_view(host)
    assert gpu.viewed == 0
