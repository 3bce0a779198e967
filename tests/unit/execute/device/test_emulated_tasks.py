"""Tasks of the emulated device: their order, their errors, what is recorded of them, and what remains of them."""

import gc
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

from lt_offload.execute.device.lanes import GaveUp
from tests.support.hostile.device import HostileDevice
from tests.unit.execute.device.conftest import KB, MODES

# -- order -------------------------------------------------------------------------------------------------------------


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
    device = opened(mode)
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


def test_the_most_urgent_update_runs_first(opened):
    device = opened("thread")
    log = []
    gate = threading.Event()
    first = device.submit("host", gate.wait, urgency=9)
    late = device.submit("d2h", gate.wait)
    for name, urgency in (("third", 3), ("first", 1), ("second", 2)):
        device.submit("host", lambda name=name: log.append(name), urgency=urgency)
    device.submit("host", lambda: log.append("zeroth"), urgency=0, after=[late, first])
    gate.set()
    device.drain()
    assert sorted(log[:2]) in (["first", "zeroth"], ["first", "second"])
    assert [name for name in log if name != "zeroth"] == ["first", "second", "third"]


# -- errors ------------------------------------------------------------------------------------------------------------


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


def test_a_task_that_gives_up_ends_what_depends_on_it_and_is_not_the_error(opened):
    """As one does that waits for another process, when a task of this process has failed."""
    device, log = opened("thread"), []

    def wait():
        while not device.failed:
            time.sleep(0.001)
        raise GaveUp

    assert not device.failed
    waiting = device.submit("parts", wait)
    device.submit("host", fail)
    device.submit("h2d", lambda: log.append("dependent"), after=[waiting])
    with pytest.raises(KeyError, match="broken"):
        device.drain()
    device.drain()
    assert device.failed
    assert waiting.done()
    assert log == []


@pytest.mark.parametrize("mode", MODES)
def test_close_reports_an_error_that_nobody_saw(mode):
    device = HostileDevice(KB, mode)
    device.submit("host", fail)
    with pytest.raises(KeyError):
        device.close()
    device.close()


# -- figures -----------------------------------------------------------------------------------------------------------


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


# -- threads and lifetime ----------------------------------------------------------------------------------------------


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
    device = HostileDevice(1 << 20, mode, check=True, poison=True)
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
