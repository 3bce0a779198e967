"""The emulated device: when tasks run, what it overwrites, what it counts, and what it refuses."""

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lt_offload.errors import OverBudget, Race
from lt_offload.execute.device import emulated
from lt_offload.execute.device.base import Cell
from lt_offload.execute.device.emulated import EmulatedDevice

MODES = ["lazy", "random", "thread"]
KB = 1024


@pytest.fixture
def opened():
    """Makes devices and closes them; errors that nobody asked for fail the test."""
    devices = []

    def make(mode="lazy", budget=1 << 20, arena=64 * KB, **options):
        device = EmulatedDevice(budget, mode, **options)
        device.reserve(arena)
        devices.append(device)
        return device

    yield make
    for device in devices:
        device.close()


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_a_chain_over_all_lanes_runs_in_order(opened, mode, seed):
    device = opened(mode, seed=seed)
    log = []
    event = None
    for i in range(60):
        lane = ("h2d", "d2h", "host")[i % 3]
        event = device.submit(lane, lambda i=i: log.append(i), after=[event] if event else [])
    device.wait(event)
    assert log == list(range(60))


@pytest.mark.parametrize("mode", MODES)
def test_one_lane_is_first_in_first_out(opened, mode):
    device = opened(mode)
    log = []
    slow = device.submit("d2h", lambda: time.sleep(0.01))
    device.submit("h2d", lambda: log.append("first"), after=[slow])
    second = device.submit("h2d", lambda: log.append("second"))
    device.synchronize(second)
    assert log == ["first", "second"]


def test_lazy_runs_only_what_is_needed(opened):
    device = opened("lazy")
    log = []
    copy = device.submit("h2d", lambda: log.append("h2d"))
    device.submit("d2h", lambda: log.append("d2h"))
    update = device.submit("host", lambda: log.append("host"), after=[copy])
    device.mark()
    assert log == []
    assert not copy.done()
    device.wait(update)
    assert log == ["h2d", "host"]
    device.drain()
    assert log == ["h2d", "host", "d2h"]


def test_random_depends_on_the_seed_only(opened):
    def run(seed):
        device = opened("random", seed=seed)
        log = []
        for i in range(40):
            device.submit("h2d", lambda i=i: log.append(f"h2d {i}"))
            device.submit("d2h", lambda i=i: log.append(f"d2h {i}"))
        early = len(log)
        device.drain()
        return early, log

    assert run(3) == run(3)
    assert len({str(run(seed)) for seed in range(5)}) == 5
    assert 0 < run(3)[0] < 80


def test_lanes_of_threads_overlap_with_each_other_and_with_the_caller(opened):
    device = opened("thread")
    meet = threading.Barrier(4, timeout=20)
    for lane in ("h2d", "d2h", "host"):
        device.submit(lane, meet.wait)
    meet.wait()
    device.drain()


@pytest.mark.parametrize("mode", MODES)
def test_long_chains_of_lanes_need_no_recursion(opened, mode):
    device = opened(mode)
    event = device.mark()
    count = []
    for i in range(3000):
        event = device.submit(("h2d", "d2h")[i % 2], lambda: count.append(1), after=[event])
    device.wait(event)
    assert len(count) == 3000


@pytest.mark.parametrize("mode", MODES)
def test_tasks_are_outside_autograd_inference_autocast_and_dispatch_modes(opened, mode):
    device = opened(mode, accounting="always")
    seen = {}

    def look():
        x = torch.ones(8, 8, requires_grad=True)
        y = x @ x
        seen.update(grad=y.requires_grad, inference=y.is_inference(), dtype=y.dtype)
        seen["modes"] = torch.utils._python_dispatch._get_current_dispatch_mode()

    with device.accounting(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        device.wait(device.submit("host", look))
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert seen == {"grad": False, "inference": False, "dtype": torch.float32, "modes": None}


# -- arena and poison ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_fresh_and_freed_memory_is_not_a_number(opened, mode):
    device = opened(mode, poison=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        buffer = device.place(512, KB)
        view = buffer.view(dtype, (KB // dtype.itemsize,))
        assert view.isnan().all()
        device.wait(writes=[buffer])
        view.zero_()
        device.free(buffer)
        assert view.isnan().all()
        assert device.empty((3, 4), (1, 3), dtype).isnan().all()
        assert device.host_empty((3, 4), dtype).isnan().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", [False, True])
def test_poison_comes_after_the_release_and_before_the_next_writer(opened, mode, check):
    device = opened(mode, poison=True, check=check)
    for i in range(100):
        old = device.place(0, 4 * KB)
        source = old.view(torch.float32, (KB,))
        device.wait(writes=[old])
        source.fill_(i)
        host = torch.empty(KB)
        out = device.submit("d2h", lambda host=host, source=source: host.copy_(source), after=[device.mark()])
        device.free(old, [out])

        new = device.place(KB, 2 * KB)
        target = new.view(torch.float32, (KB // 2,))
        copied = device.submit("h2d", lambda target=target: target.fill_(-1.0), writes=[new])
        device.wait(copied)
        assert (target == -1.0).all()
        device.wait(out)
        assert (host == i).all()
        device.free(new)


def test_memory_is_poisoned_as_soon_as_its_release_is_over(opened):
    device = opened("lazy")
    buffer = device.place(0, KB)
    view = buffer.view(torch.float32, (KB // 4,))
    view.zero_()
    out = device.submit("d2h", lambda: None)
    device.free(buffer, [out])
    assert not view.isnan().any()
    device.synchronize(out)
    assert view.isnan().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writer", ["task", "compute"])
def test_a_writer_of_reused_memory_waits_for_the_release(opened, mode, writer):
    device = opened(mode)
    gate = threading.Event()
    old = device.place(0, KB)
    out = device.submit("d2h", gate.wait if mode == "thread" else gate.set)
    device.free(old, [out])
    new = device.place(512, 512)
    if mode == "thread":
        threading.Timer(0.05, gate.set).start()
    if writer == "compute":
        device.wait(writes=[new])
    else:
        device.wait(device.submit("h2d", lambda: None, writes=[new]))
    assert gate.is_set()
    assert out.done()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", [False, True])
def test_bookkeeping_does_not_grow(opened, mode, check):
    device = opened(mode, check=check, poison=True)

    def cycle():
        events = []
        for offset in (0, 3 * KB, 8 * KB):
            buffer = device.place(offset, 2 * KB + offset // 2, f"w{offset}")
            ready = device.submit("h2d", lambda: None, writes=[buffer])
            device.wait(ready, reads=[buffer])
            events.append(device.submit("d2h", lambda: None, after=[device.mark()], reads=[buffer]))
            device.free(buffer, events[-1:])
        device.synchronize(*events)

    sizes = []
    for i in range(1000):
        cycle()
        if i in (50, 999):
            gc.collect()
            sizes.append(len(device._arena._freed))
    assert sizes[1] <= max(sizes[0], 40)
    device.drain()
    assert device._lanes.pending() == []


def test_allocate_takes_the_first_range_that_fits(opened):
    device = opened()
    first = device.allocate(1000, "a")
    second = device.allocate(1000, "b")
    assert (first.offset, second.offset) == (0, KB)
    device.free(first)
    assert device.allocate(KB, "c").offset == 0
    with pytest.raises(OverBudget, match="d needs .* largest free range has"):
        device.allocate(64 * KB, "d")


def test_the_arena_is_within_the_budget(opened):
    device = opened(budget=100 * KB, arena=10 * KB)
    with pytest.raises(OverBudget, match=r"102401 bytes.* exceeds the budget of .*\(102400 bytes\)"):
        device.reserve(100 * KB + 1)
    assert device.memory() == 10 * KB
    device.reserve(100 * KB)
    assert device.memory() == 100 * KB
    device.reserve(KB)
    assert device.memory() == KB


def test_an_arena_in_use_is_not_replaced(opened):
    device = opened()
    device.place(0, KB)
    with pytest.raises(AssertionError, match="in use"):
        device.reserve(KB)


# -- happens-before --------------------------------------------------------------------------------------------------


def checked(opened, mode):
    return opened(mode, check=True)


@pytest.mark.parametrize("mode", MODES)
def test_race_read_after_write(opened, mode):
    device = checked(opened, mode)
    buffer = device.place(0, KB, "w")
    copied = device.submit("h2d", lambda: None, writes=[buffer], label="prefetch w")
    device.begin_compute(3, "forward 3")
    with pytest.raises(Race, match='"forward 3" on compute reads device buffer \'w\'.*"prefetch w" on h2d writes'):
        device.wait(reads=[buffer])
    device.wait(copied, reads=[buffer])


@pytest.mark.parametrize("mode", MODES)
def test_race_write_after_read(opened, mode):
    device = checked(opened, mode)
    host = Cell("host w")
    device.submit("h2d", lambda: None, reads=[host], label="prefetch w")
    with pytest.raises(Race, match='"update" on host writes .* "prefetch w" on h2d reads'):
        device.submit("host", lambda: None, writes=[host], label="update")


@pytest.mark.parametrize("mode", MODES)
def test_race_write_after_write(opened, mode):
    device = checked(opened, mode)
    host = Cell("host w")
    device.submit("d2h", lambda: None, writes=[host], label="write back")
    with pytest.raises(Race, match='"update" on host writes .* "write back" on d2h writes'):
        device.submit("host", lambda: None, writes=[host], label="update")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forgotten", [True, False])
def test_race_on_reused_memory(opened, mode, forgotten):
    """Two buffers over one range: the second is written while the first may still be read."""
    device = checked(opened, mode)
    old = device.place(0, 4 * KB, "old")
    device.wait(device.submit("h2d", lambda: None, writes=[old], label="prefetch old"), reads=[old])
    out = device.submit("d2h", lambda: None, after=[device.mark()], reads=[old], label="offload old")
    device.free(old, [] if forgotten else [out])
    new = device.place(2 * KB, KB, "new")
    if forgotten:
        with pytest.raises(
            Race, match=r'"prefetch new" on h2d writes .*\'new\'.* "offload old" on d2h reads .*\'old\''
        ):
            device.submit("h2d", lambda: None, writes=[new], label="prefetch new")
    else:
        device.submit("h2d", lambda: None, writes=[new], label="prefetch new")


def test_memory_reused_twice_is_still_followed(opened):
    """The range passes through a buffer that nobody used: the older reader must not be forgotten."""
    device = checked(opened, "lazy")
    old = device.place(0, KB, "old")
    device.submit("h2d", lambda: None, writes=[old], label="prefetch old")
    device.free(old)
    device.free(device.place(0, KB, "unused"))
    new = device.place(0, KB, "new")
    with pytest.raises(Race, match="prefetch old"):
        device.wait(writes=[new])


def test_reading_what_was_never_written_and_using_what_was_freed(opened):
    device = checked(opened, "lazy")
    buffer = device.place(0, KB, "w")
    with pytest.raises(Race, match="before anything was written"):
        device.wait(reads=[buffer])
    device.wait(writes=[buffer])
    device.free(buffer)
    with pytest.raises(Race, match="after it was freed"):
        device.mark(reads=[buffer])


def test_memory_settled_by_synchronize_needs_no_order(opened):
    device = checked(opened, "lazy")
    for _ in range(60):  # enough to make the arena forget settled ranges
        buffers = [device.place(i * KB, KB, f"b{i}") for i in range(20)]
        events = [device.submit("h2d", lambda: None, writes=[b]) for b in buffers]
        device.synchronize(*events)
        for buffer in buffers:
            device.free(buffer)
    assert len(device._arena._freed) < 60


# -- dropped dependencies --------------------------------------------------------------------------------------------


def iterate_over_two_weights(device):
    """A program in which every dependency matters: two weights take turns in one range and are updated on the host."""
    host, grad = [Cell("host w0"), Cell("host w1")], [Cell("grad w0"), Cell("grad w1")]
    updated = [device.mark(), device.mark()]
    for step in range(6):
        i = step % 2
        buffer = device.place(0, KB, "w")
        ready = device.submit(
            "h2d", lambda: None, after=[updated[i]], reads=[host[i]], writes=[buffer], label="prefetch"
        )
        device.wait(ready, reads=[buffer])
        copied = device.submit(
            "d2h", lambda: None, after=[device.mark()], reads=[buffer], writes=[grad[i]], label="grad"
        )
        device.free(buffer, [copied])
        updated[i] = device.submit(
            "host", lambda: None, after=[copied], reads=[grad[i]], writes=[host[i]], label="update"
        )
    device.drain()


DEPENDENCIES = [
    ("prefetch", "update"),
    ("grad", "compute"),
    ("update", "grad"),
    ("compute", "prefetch"),
    ("prefetch", "release w"),
    ("free w", "grad"),
]


@pytest.mark.parametrize("dropped", [None, *DEPENDENCIES])
def test_the_seam_drops_a_dependency_and_the_checker_notices(opened, dropped):
    seen = set()

    def ignore(waiter, awaited):
        seen.add((waiter, awaited))
        return (waiter, awaited) == dropped

    device = opened(check=True, ignore=ignore)
    if dropped is None:
        iterate_over_two_weights(device)
        assert set(DEPENDENCIES) <= seen
    else:
        with pytest.raises(Race):
            iterate_over_two_weights(device)


def test_a_dropped_dependency_really_is_not_awaited(opened):
    device = opened(ignore=lambda waiter, awaited: (waiter, awaited) == ("prefetch w", "update w"))
    log = []
    update = device.submit("host", lambda: log.append("update"), label="update w")
    device.wait(device.submit("h2d", lambda: log.append("prefetch"), after=[update], label="prefetch w"))
    assert log == ["prefetch"]


# -- errors ----------------------------------------------------------------------------------------------------------


def fail():
    raise KeyError("broken")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["wait", "synchronize", "drain"])
def test_an_error_reaches_the_caller_once_and_cancels_what_depends_on_it(opened, mode, how):
    device = opened(mode)
    log = []
    bad = device.submit("d2h", fail)
    dependent = device.submit("h2d", lambda: log.append("dependent"), after=[bad])
    behind = device.submit("d2h", lambda: log.append("behind"))
    device.submit("host", lambda: log.append("independent"))
    with pytest.raises(KeyError, match="broken"):
        device.drain() if how == "drain" else getattr(device, how)(dependent)
    device.drain()
    assert log == ["independent"]
    assert dependent.done()
    for event in (bad, dependent, behind):
        with pytest.raises(KeyError):
            device.wait(event)
    device.wait(device.submit("d2h", lambda: log.append("later")))
    assert log[-1] == "later"


def test_an_error_is_raised_by_the_next_wait_for_anything(opened):
    device = opened("thread")
    bad = device.submit("host", fail)
    while not bad.done():
        time.sleep(0.001)
    with pytest.raises(KeyError):
        device.wait()
    device.wait()


@pytest.mark.parametrize("mode", MODES)
def test_memory_released_by_a_failed_task_can_be_used_again(opened, mode):
    device = opened(mode, poison=True)
    old = device.place(0, KB)
    bad = device.submit("d2h", fail)
    device.free(old, [bad])
    with pytest.raises(KeyError):
        device.drain()
    new = device.place(0, KB)
    view = new.view(torch.float32, (KB // 4,))
    device.wait(device.submit("h2d", view.zero_, writes=[new]))
    assert not view.any()


@pytest.mark.parametrize("mode", MODES)
def test_close_reports_an_error_that_nobody_saw(mode):
    device = EmulatedDevice(KB, mode)
    device.submit("host", fail)
    with pytest.raises(KeyError):
        device.close()
    device.close()


# -- accounting ------------------------------------------------------------------------------------------------------


def test_the_budget_is_hard_to_the_byte(opened):
    device = opened(budget=100 * KB, arena=60 * KB)
    with device.accounting():
        kept = [torch.empty(10 * KB, dtype=torch.uint8) for _ in range(4)]
        assert device.memory() == 100 * KB
        with pytest.raises(OverBudget, match=r"\(1 bytes\).*102400 bytes\) are in use"):
            torch.empty(1, dtype=torch.uint8)
        del kept[0]
        assert device.memory() == 90 * KB
    assert device.peak_memory() == 100 * KB
    kept.clear()
    device.reset_peak()
    assert device.peak_memory() == device.memory() == 60 * KB


def test_arena_views_host_memory_and_tasks_cost_nothing(opened):
    device = opened("lazy", budget=64 * KB, arena=64 * KB)
    host = device.host_adopt(torch.ones(256))
    with device.accounting():
        buffer = device.place(0, KB)
        view = buffer.view(torch.float32, (256,))
        device.wait(device.submit("h2d", lambda: view.copy_(host + torch.zeros(256)), writes=[buffer]))
        view.add_(host)
        fresh = device.host_empty((256,), torch.float32).copy_(view)
        assert device.memory() == 64 * KB
        with pytest.raises(OverBudget):
            device.empty((1,), None, torch.float32)
    assert device.host_bytes == 2 * KB
    del fresh
    assert device.host_adopt(host).data_ptr() == host.data_ptr()
    assert device.host_bytes == KB


def test_a_full_device_waits_for_copies_that_are_leaving(opened):
    """A task holds the only reference to device memory; its end makes the room that is asked for."""
    for mode in MODES:
        device = opened(mode, budget=100 * KB, arena=0)
        with device.accounting():
            leaving = torch.zeros(60 * KB, dtype=torch.uint8)
            out = torch.empty(0)
            pause = 0.1 if mode == "thread" else 0

            def copy(leaving=leaving, pause=pause):
                time.sleep(pause)

            device.submit("d2h", copy)
            del leaving, copy
            out = torch.zeros(50 * KB, dtype=torch.uint8)
            with pytest.raises(OverBudget):
                torch.zeros(60 * KB, dtype=torch.uint8)
        assert device.peak_memory() <= 100 * KB
        del out


def test_every_iteration_counts(opened):
    device = opened(budget=1 << 20, arena=0)
    for nbytes in (5000, 7000, 6000):
        device.reset_peak()
        with device.accounting("a"):
            torch.empty(nbytes, dtype=torch.uint8)
        assert device.peak_memory() == nbytes
    with pytest.raises(OverBudget), device.accounting("a"):
        torch.empty((1 << 20) + 1, dtype=torch.uint8)


def test_between_iterations_what_is_made_of_device_memory_counts(opened):
    """A tensor does not say whose memory it is in; its origin does."""
    device = opened(budget=100 * KB, arena=10 * KB)
    host, buffer = torch.ones(KB), device.place(0, KB)
    with device.between():
        with device.accounting():
            made = torch.zeros(KB)  # in an iteration everything counts
        assert device.memory() == 14 * KB
        copies = [host.clone(), torch.zeros(100 * KB), host + host, torch.cat([host, host]), host.view(2, -1)]
        copies[0].mul_(0.9).add_(host, alpha=0.1)
        assert device.memory() == 14 * KB
        more = [made.clone(), made + host, torch.stack([made.detach(), made]), buffer.bytes.clone()]
        assert device.memory() == 14 * KB + 4 * 4 * KB + KB
        more.append(more[0] * 2)
        assert device.memory() == 14 * KB + 5 * 4 * KB + KB
        fetched = device.empty((KB,), None, torch.uint8)
        assert device.memory() == 14 * KB + 5 * 4 * KB + 2 * KB
        with pytest.raises(OverBudget):
            made.repeat(100)
        with device.accounting(), pytest.raises(OverBudget):
            torch.zeros(100 * KB)
    del made, copies, more, fetched
    assert device.memory() == 10 * KB


def test_what_stays_on_the_device_counts(opened):
    device = opened(budget=100 * KB, arena=10 * KB)
    table = torch.ones(KB)
    device.stays(table)
    assert device.memory() == 14 * KB
    with pytest.raises(OverBudget):
        device.stays(torch.ones(30 * KB))
    del table
    assert device.memory() == 10 * KB


@pytest.mark.parametrize(("accounting", "second"), [("always", 7000), ("off", 0)])
def test_accounting_always_and_off(opened, accounting, second):
    device = opened(arena=0, accounting=accounting)
    for nbytes in (5000, 7000):
        with device.accounting("a"):
            torch.empty(nbytes, dtype=torch.uint8)
    assert device.peak_memory() == second


def test_backward_is_counted(opened):
    device = opened(arena=0)
    weight = torch.ones(64, 64, requires_grad=True)
    with device.accounting():
        (weight @ weight).sum().backward()
        assert device.memory() == weight.grad.nbytes
    assert device.peak_memory() >= 2 * weight.nbytes


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_spans_are_recorded_when_asked_for(opened, mode):
    device = opened(mode)
    device.wait(device.submit("h2d", lambda: None, label="before"))
    device.record(True)
    start = device.now()
    token = device.begin_compute(7, "forward 0")
    device.wait(device.submit("h2d", lambda: time.sleep(0.01), op=3, label="prefetch w"))
    device.end_compute(token)
    device.record(False)
    device.wait(device.submit("h2d", lambda: None, label="after"))
    spans = device.take_spans()
    assert [span[:3] for span in spans] == [(3, "h2d", "prefetch w"), (7, "compute", "forward 0")]
    (_, _, _, s0, e0), (_, _, _, s1, e1) = spans
    assert start <= s1 <= s0 < e0 <= e1 <= device.now()
    assert e0 - s0 >= 0.01
    assert device.take_spans() == []


def test_copies_are_throttled_and_the_host_is_not(opened, monkeypatch):
    slept = []
    clock = SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda s: (slept.append(threading.current_thread().name), time.sleep(s))
    )
    monkeypatch.setattr(emulated, "time", clock)
    device = opened("thread", h2d_bytes_per_s=1e6, d2h_bytes_per_s=2e6)
    device.record(True)
    for lane in ("h2d", "d2h", "host"):
        device.submit(lane, lambda: None, nbytes=50_000)
    device.drain()
    lengths = {lane: end - start for _, lane, _, start, end in device.take_spans()}
    assert lengths["h2d"] >= 0.05
    assert lengths["d2h"] >= 0.025
    assert set(slept) == {"lt_offload h2d", "lt_offload d2h"}


def test_rng_state_restores_the_stream(opened):
    device = opened()
    torch.manual_seed(0)
    state = device.rng_state()
    first = torch.rand(5)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)


# -- threads and lifetime --------------------------------------------------------------------------------------------


def test_thread_count_of_the_host_lane_stays_there(opened):
    before = torch.get_num_threads()
    device = opened("thread", host_threads=before + 3)
    seen = {}
    device.submit("host", lambda: seen.update(host=torch.get_num_threads()))
    device.submit("h2d", lambda: seen.update(h2d=torch.get_num_threads()))
    device.drain()
    newcomer = threading.Thread(target=lambda: seen.update(newcomer=torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert seen == {"host": before + 3, "h2d": before, "newcomer": before}
    assert torch.get_num_threads() == before


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("lt_offload")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left_of_a_device(mode, closed):
    before = len(threads())
    device = EmulatedDevice(1 << 20, mode, check=True, poison=True)
    device.reserve(KB)
    buffer = device.place(0, KB)
    log = []
    with device.accounting("a"):
        for lane in ("h2d", "d2h", "host"):
            device.submit(lane, lambda lane=lane: log.append(lane))
    device.free(buffer, [device.submit("d2h", lambda: time.sleep(0.01))])
    slab = weakref.ref(device._arena)
    gone = weakref.ref(device)
    if closed:
        device.close()
        device.close()
        assert slab() is None
    del device
    gc.collect()
    assert gone() is None
    assert slab() is None
    assert sorted(log) == ["d2h", "h2d", "host"]
    assert len(threads()) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failing", [False, True])
def test_a_task_that_is_over_keeps_nothing(opened, mode, failing):
    device = opened(mode)
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)

    def work(tensor):
        tensor.add_(1)
        if failing:
            fail()

    event = device.submit("d2h", lambda tensor=tensor: work(tensor))
    del tensor
    with pytest.raises(KeyError) if failing else nullcontext():
        device.wait(event)
    del event
    device.wait(device.submit("d2h", lambda: None))  # its thread has gone on to something else
    gc.collect()
    assert gone() is None
