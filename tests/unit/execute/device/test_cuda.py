"""The logic of the CUDA device on a model of CUDA. Nothing here says what real hardware does."""

import gc
import threading
import time
import weakref

import pytest
import torch

from lt_offload.errors import OverBudget, UnsupportedError
from lt_offload.execute.device.cuda import CudaDevice
from tests.support.gpu_model import CONTEXT, KB, Gpu, Stream


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def device(gpu):
    device = CudaDevice(1 << 20, runtime=gpu)
    device.reserve(64 * KB)
    yield device
    device.close()


# -- issue and order -------------------------------------------------------------------------------------------------


def test_a_copy_is_issued_at_once_by_the_calling_thread(device, gpu):
    where = []
    event = device.submit("h2d", lambda: where.append((threading.current_thread(), gpu.current_stream().name)))
    assert where == [(threading.main_thread(), "h2d")]
    assert not event.done()
    device.synchronize(event)
    assert event.done()


def test_the_compute_lane_waits_for_a_copy_without_blocking_the_host(device, gpu):
    log = []
    event = device.submit("h2d", lambda: gpu.launch(lambda: log.append("copy")))
    device.wait(event)
    gpu.launch(lambda: log.append("kernel"))
    assert log == []
    gpu.main.synchronize()
    assert log == ["copy", "kernel"]


def test_a_copy_waits_for_the_kernels_before_a_mark(device, gpu):
    log = []
    gpu.launch(lambda: log.append("kernel"))
    mark = device.mark()
    gpu.launch(lambda: log.append("later kernel"))
    event = device.submit("d2h", lambda: gpu.launch(lambda: log.append("copy")), after=[mark])
    assert not mark.done()
    device.synchronize(event)
    assert log == ["kernel", "copy"]


def test_a_whole_iteration_through_a_host_update(device, gpu):
    """Kernel -> gradient copy -> update on the host -> copy back -> kernel, all queued before anything runs."""
    weight, grad, view, seen = torch.zeros(4), torch.zeros(4), torch.zeros(4), []
    gate = threading.Event()
    for step in range(1, 4):
        gate.clear()
        gpu.launch(lambda step=step: grad.fill_(step))
        out = device.submit("d2h", lambda: gpu.launch(lambda: None), after=[device.mark()])
        update = device.submit("host", lambda: (gate.wait(20), weight.add_(grad)), after=[out])
        back = device.submit("h2d", lambda: gpu.launch(lambda: view.copy_(weight)), after=[update])
        assert not update.done()
        assert not back.done()
        threading.Timer(0.02, gate.set).start()
        device.wait(back)  # blocks until the copy is issued
        assert update.done()
        gpu.launch(lambda: seen.append(view[0].item()))
    gpu.main.synchronize()
    assert seen == [1.0, 3.0, 6.0]


def test_a_ready_copy_does_not_overtake_one_that_waits(device, gpu):
    gate, log = threading.Event(), []
    update = device.submit("host", lambda: gate.wait(20))
    device.submit("h2d", lambda: log.append("first"), after=[update])
    second = device.submit("h2d", lambda: log.append("second"))
    assert log == []
    gate.set()
    device.synchronize(second)
    assert log == ["first", "second"]
    device.submit("h2d", lambda: log.append(threading.current_thread().name))
    assert log[-1] == threading.main_thread().name


def test_waiting_for_the_host_lane_blocks_until_it_has_run(device, gpu):
    log = []
    device.wait(device.submit("host", lambda: (time.sleep(0.02), log.append(torch.is_grad_enabled()))))
    assert log == [False]


def test_a_range_is_written_after_its_last_reader(device, gpu):
    log = []
    old = device.place(0, KB, "old")
    gpu.launch(lambda: log.append("kernel reads old"))
    out = device.submit("d2h", lambda: gpu.launch(lambda: log.append("copy of old")))
    device.free(old, [out])
    new = device.place(512, 512, "new")
    event = device.submit("h2d", lambda: gpu.launch(lambda: log.append("copy to new")), writes=[new])
    device.synchronize(event)
    assert sorted(log[:2]) == ["copy of old", "kernel reads old"]
    assert log[2:] == ["copy to new"]


def test_compute_writes_a_range_after_its_last_reader(device, gpu):
    log = []
    old = device.place(0, KB, "old")
    out = device.submit("d2h", lambda: gpu.launch(lambda: log.append("copy of old")))
    device.free(old, [out])
    device.wait(writes=[device.place(0, KB, "new")])
    gpu.launch(lambda: log.append("kernel writes new"))
    gpu.main.synchronize()
    assert log == ["copy of old", "kernel writes new"]


def test_a_range_is_written_after_its_last_reader_whoever_had_it_in_between(device, gpu):
    log = []
    old = device.place(0, KB, "old")
    out = device.submit("d2h", lambda: gpu.launch(lambda: log.append("copy of old")))
    device.free(old, [out])
    device.free(device.place(0, KB, "given back unused"))
    device.synchronize(
        device.submit("h2d", lambda: gpu.launch(lambda: log.append("copy to new")), writes=[device.place(0, KB, "new")])
    )
    assert log == ["copy of old", "copy to new"]


def test_bookkeeping_does_not_grow(device, gpu):
    for _ in range(1000):
        for offset in (0, 3 * KB, 8 * KB):
            buffer = device.place(offset, 2 * KB)
            device.wait(device.submit("h2d", lambda: None, writes=[buffer]))
            out = device.submit("d2h", lambda: None, after=[device.mark()])
            device.free(buffer, [out])
        device.synchronize(out)
        gpu.main.synchronize()
    assert len(device._arena._freed) < 40
    assert all(len(tasks) <= 3 for tasks in device._runner._in_flight.values())


def on_its_own(gpu, name="aside"):
    stream = Stream(gpu, name)
    return stream, gpu.use(stream)


def test_the_compute_lane_is_one_sequence_on_whatever_stream(device, gpu):
    log = []
    aside, on_it = on_its_own(gpu)
    gpu.launch(lambda: log.append("update"))
    device.mark()
    with on_it:
        copy = device.submit("d2h", lambda: gpu.launch(lambda: log.append("copy")), after=[device.mark()])
        gpu.launch(lambda: log.append("aside"))
        device.mark()
    device.wait()
    gpu.launch(lambda: log.append("main"))
    device.synchronize(copy)
    assert log == ["update", "copy"]
    gpu.main.synchronize()
    assert log == ["update", "copy", "aside", "main"]


@pytest.mark.parametrize("end", ["drain", "close"])
def test_an_end_on_another_stream_waits_for_the_one_before(gpu, end):
    log = []
    device = CudaDevice(1 << 20, runtime=gpu)
    gpu.launch(lambda: log.append("kernel"))
    device.mark()
    with on_its_own(gpu)[1]:
        getattr(device, end)()
    assert log == ["kernel"]
    device.close()


def test_orders_on_one_stream_take_no_events(device, gpu):
    device.mark()
    before = gpu.events, gpu.waits
    for _ in range(3):
        device.wait()
    assert (gpu.events, gpu.waits) == before


def test_the_stream_is_that_of_the_calling_thread(device, gpu):
    assert device.stream() is gpu.main
    aside, on_it = on_its_own(gpu)
    with on_it:
        assert device.stream() is aside


# -- memory that a copy uses -----------------------------------------------------------------------------------------


def test_memory_of_a_copy_is_kept_until_the_gpu_is_through(device, gpu):
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    event = device.submit("d2h", lambda tensor=tensor: None)
    del tensor
    device.mark()
    assert gone() is not None
    device.synchronize(event)
    assert gone() is None


def test_memory_of_a_copy_is_given_back_when_the_compute_lane_is_behind_it(device, gpu):
    """Then the allocator may give it to the next kernel although nothing has run yet."""
    tensors = [torch.zeros(4) for _ in range(3)]
    gone = [weakref.ref(t) for t in tensors]
    events = [device.submit("d2h", lambda tensor=tensor: None) for tensor in tensors]
    del tensors
    device.wait(events[1])
    gc.collect()
    assert [ref() is None for ref in gone[:2]] == [True, True]
    assert gone[2]() is not None
    assert not events[0].done()


# -- errors ----------------------------------------------------------------------------------------------------------


def fail():
    raise KeyError("broken")


@pytest.mark.parametrize("lane", ["h2d", "d2h", "host"])
def test_an_error_reaches_the_caller_and_cancels_what_depends_on_it(device, gpu, lane):
    log = []
    bad = device.submit(lane, fail)
    dependent = device.submit("h2d", lambda: log.append("dependent"), after=[bad])
    with pytest.raises(KeyError, match="broken"):
        device.wait(dependent)
    device.drain()
    assert log == []
    device.synchronize(device.submit(lane, lambda: log.append("later")))
    assert log == ["later"]


def test_work_issued_before_an_error_is_still_waited_for(device, gpu):
    log = []

    def half():
        gpu.launch(lambda: log.append("half"))
        fail()

    old = device.place(0, KB)
    device.free(old, [device.submit("d2h", half)])
    with pytest.raises(KeyError):
        device.wait()
    new = device.place(0, KB)
    device.wait(writes=[new])
    gpu.launch(lambda: log.append("kernel"))
    gpu.main.synchronize()
    assert log == ["half", "kernel"]


# -- budget and figures ----------------------------------------------------------------------------------------------


def test_the_allocator_is_capped_at_the_budget_less_the_context(gpu):
    device = CudaDevice(500 * KB, runtime=gpu)
    assert gpu.limit == 400 * KB
    with pytest.raises(OverBudget, match="exceed the budget of 512 kB"):
        device.reserve(400 * KB + 1)
    device.reserve(400 * KB)
    assert device.memory() == 500 * KB
    assert device.peak_memory() == 500 * KB + 1
    device.close()
    assert gpu.limit is None


def test_running_out_of_memory_is_over_budget(device, gpu):
    with pytest.raises(OverBudget, match="does not fit: no room"):
        device.reserve(900 * KB)
    with pytest.raises(OverBudget, match=r"the budget of 1.05 MB is used up; a batch that"), device.accounting("a"):
        raise torch.OutOfMemoryError("no room")
    device.reserve(KB)
    assert device.memory() == CONTEXT + KB


def test_what_is_left_in_cycles_makes_room(device, gpu):
    class Left:
        def __init__(self):
            self.itself = self

    left = Left()
    gone = weakref.ref(left)
    gc.disable()
    try:
        del left
        assert gone() is not None
        device.reserve(KB)
        assert gone() is None
    finally:
        gc.enable()


def test_the_slab_is_given_back_with_the_device(gpu):
    device = CudaDevice(1 << 20, runtime=gpu)
    device.reserve(64 * KB)
    slab, seen = weakref.ref(device._arena.slab), []
    empty = gpu.empty
    gpu.empty = lambda nbytes: (seen.append(slab()), empty(nbytes))[1]
    device.close()
    assert seen == [None], "torch's allocator returns to the driver what is free at that moment"


def test_spans_are_on_the_clock_of_the_host(device, gpu):
    device.submit("h2d", lambda: None, label="before")
    device.record(True)
    start = device.now()
    token = device.begin_compute(4, "forward 2")
    copy = device.submit("h2d", lambda: gpu.launch(lambda: time.sleep(0.01)), op=1, label="prefetch")
    device.wait(device.submit("host", lambda: time.sleep(0.01), op=2, label="update"))
    device.end_compute(token)
    assert [span[:3] for span in device.take_spans()] == [(2, "host", "update")]
    device.synchronize(copy)
    gpu.main.synchronize()
    end = device.now()
    spans = sorted(device.take_spans())
    assert [span[:3] for span in spans] == [(1, "h2d", "prefetch"), (4, "compute", "forward 2")]
    assert all(start - 0.005 <= s[3] <= s[4] <= end + 0.005 for s in spans)
    assert spans[0][4] - spans[0][3] >= 0.01
    device.record(False)
    assert device.begin_compute(0, "") is None
    device.synchronize(device.submit("h2d", lambda: None))
    assert device.take_spans() == []


def test_both_generators_are_saved(device, gpu):
    state = device.rng_state()
    first = torch.rand(3), torch.rand(3, generator=gpu.generator)
    device.set_rng_state(state)
    assert all(map(torch.equal, first, (torch.rand(3), torch.rand(3, generator=gpu.generator))))


def test_host_memory_is_registered_until_close(gpu):
    device = CudaDevice(1 << 20, runtime=gpu)
    adopted = device.host_adopt(torch.arange(5.0))
    fresh = device.host_empty((7,), torch.bfloat16)
    assert gpu.registered
    assert device.host_bytes == adopted.nbytes + fresh.nbytes
    device.close()
    device.close()
    assert not gpu.registered
    assert torch.equal(adopted, torch.arange(5.0))


# -- computing in host memory ----------------------------------------------------------------------------------------


def test_kernels_read_what_the_last_update_wrote_and_the_next_update_waits_for_them(device, gpu):
    weight, seen, gate = device.host_adopt(torch.zeros(4)), [], threading.Event()
    view = device.zero_copy_view(weight)
    event = None
    for step in range(1, 4):
        gate.clear()
        after = [device.mark()] if event is None else [event, device.mark()]
        event = device.submit("host", lambda: (gate.wait(20), weight.add_(1)), after=after)
        threading.Timer(0.02, gate.set).start()
        device.wait(event)  # blocks: a kernel cannot be ordered after work on the host but by launching it later
        gpu.launch(lambda: seen.append(view[0].item()))
        assert len(seen) == step - 1  # the kernel has not run when the next update is queued behind it
    gpu.main.synchronize()
    assert seen == [1.0, 2.0, 3.0]


def test_draining_waits_for_kernels_that_read_host_memory(device, gpu):
    log = []
    gpu.launch(lambda: log.append("kernel"))
    device.drain()
    assert log == ["kernel"]


def test_whether_kernels_reach_host_memory_is_tried_once(device, gpu):
    hosts = [device.host_adopt(torch.arange(5.0)) for _ in range(3)]
    views = [device.zero_copy_view(host) for host in hosts]
    assert gpu.viewed == 3 + 3  # numbers of three types first
    views[1].mul_(2)
    assert torch.equal(hosts[1], 2 * torch.arange(5.0))


@pytest.mark.parametrize(
    ("how", "message"),
    [({"refuses": "not mapped"}, "not mapped"), ({"copies": True}, "the host reads something else")],
)
def test_a_platform_that_does_not_reach_host_memory_is_refused(device, gpu, how, message):
    vars(gpu).update(how)
    host = device.host_adopt(torch.arange(5.0))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"cpu cannot compute in host memory: {message}"):
            device.zero_copy_view(host)
    assert gpu.viewed == 1


def test_empty_honours_strides(device):
    assert device.empty((2, 3), (1, 2), torch.float32).stride() == (1, 2)
    assert device.empty((2, 3), None, torch.bfloat16).is_contiguous()


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left_of_a_device(gpu, closed):
    device = CudaDevice(1 << 20, runtime=gpu)
    device.reserve(KB)
    device.host_empty((7,), torch.float32)
    log = []
    device.submit("h2d", lambda: gpu.launch(lambda: log.append("copy")), after=[device.submit("host", lambda: None)])
    gone = weakref.ref(device)
    if closed:
        device.close()
    del device
    gc.collect()
    assert gone() is None
    assert not gpu.registered
    assert log == ["copy"]
    assert not [t for t in threading.enumerate() if t.name.startswith("lt_offload")]


def test_tasks_do_not_see_the_autocast_of_the_caller(device, gpu):
    seen = []
    torch.set_autocast_enabled("cuda", True)
    try:
        device.submit("h2d", lambda: seen.append(torch.is_autocast_enabled("cuda")))
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [False]
