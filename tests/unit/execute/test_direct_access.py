"""Computations that reach into host memory, on the emulated device: order, aliasing, and the time it takes."""

import time

import pytest
import torch

from lt_offload.errors import Race, UnsupportedError
from lt_offload.execute.device import Cell
from lt_offload.execute.emulated import EmulatedDevice

RATE = 1e6


@pytest.fixture
def opened():
    devices = []

    def make(mode="lazy", **options):
        devices.append(EmulatedDevice(1 << 20, mode, **options))
        return devices[-1]

    yield make
    for device in devices:
        device.close()


def test_a_direct_view_is_the_host_memory_and_costs_none_of_the_device(opened):
    device = opened(accounting="always")
    host = device.host_adopt(torch.arange(6.0).view(2, 3))
    with device.accounting():
        view = device.direct_view(host)
        assert view.untyped_storage().data_ptr() == host.untyped_storage().data_ptr()
        assert not view.is_inference()
        view.mul_(2)
        assert device.memory() == 0
    assert torch.equal(host, 2 * torch.arange(6.0).view(2, 3))


def test_a_direct_view_needs_contiguous_memory(opened):
    with pytest.raises(UnsupportedError, match="contiguous"):
        opened().direct_view(torch.zeros(3, 2).T)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_read_comes_after_the_update_on_the_host(opened, ordered):
    device, weight = opened(check=True), Cell("weight")
    update = device.submit("host", lambda: None, writes=[weight], label="update")
    if ordered:
        device.wait(update, reads=[weight])
    else:
        with pytest.raises(Race, match='reads .weight., not ordered after: "update" on host'):
            device.wait(reads=[weight])


@pytest.mark.parametrize("ordered", [True, False])
def test_an_update_on_the_host_comes_after_the_read(opened, ordered):
    device, weight = opened(check=True), Cell("weight")
    device.wait(reads=[weight])
    after = [device.mark()] if ordered else []
    if ordered:
        device.submit("host", lambda: None, after=after, writes=[weight], label="update")
    else:
        with pytest.raises(Race, match='"update" on host writes .weight., not ordered after: "compute" on compute'):
            device.submit("host", lambda: None, after=after, writes=[weight], label="update")


def test_crossing_a_link_takes_as_long_as_the_bytes(opened):
    device = opened("thread", h2d_bytes_per_s=RATE, d2h_bytes_per_s=2 * RATE)
    start = device.now()
    device.cross("h2d", 30_000)
    between = device.now()
    device.cross("d2h", 30_000)
    assert between - start >= 0.03
    assert device.now() - between >= 0.015


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_copies_pause_while_a_computation_uses_their_link(opened, lane):
    device = opened("thread", h2d_bytes_per_s=RATE, d2h_bytes_per_s=RATE)
    device.record(True)
    other = {"h2d": "d2h", "d2h": "h2d"}[lane]
    running = device.submit(lane, lambda: None, nbytes=50_000)
    beside = device.submit(other, lambda: None, nbytes=50_000)
    start = device.now()
    device.cross(lane, 50_000)
    assert device.now() - start >= 0.05
    device.synchronize(running, beside)
    lengths = {on: end - start for _, on, _, start, end in device.take_spans()}
    assert lengths[lane] >= 0.1
    assert lengths[lane] - lengths[other] >= 0.03


def test_a_copy_that_begins_during_an_access_pauses_for_the_rest_of_it(opened):
    device = opened("thread", h2d_bytes_per_s=RATE)
    device.record(True)
    update = device.submit("host", lambda: time.sleep(0.02))
    copy = device.submit("h2d", lambda: None, after=[update], nbytes=10_000)
    start = device.now()
    device.cross("h2d", 60_000)
    device.synchronize(copy)
    spans = {lane: (begin, end) for _, lane, _, begin, end in device.take_spans()}
    assert spans["h2d"][0] < start + 0.06
    assert spans["h2d"][1] >= start + 0.07


def test_links_without_a_rate_take_no_time(opened):
    device = opened("thread")
    start = device.now()
    device.cross("h2d", 10**12)
    assert device.now() - start < 1
