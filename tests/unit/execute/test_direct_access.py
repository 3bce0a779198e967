"""Computations that reach into host memory, on the emulated device: order and aliasing."""

import pytest
import torch

from lt_offload.errors import UnsupportedError
from lt_offload.execute.device.base import Cell
from tests.support.hostile.device import HostileDevice
from tests.support.hostile.races import Race


@pytest.fixture
def opened():
    devices = []

    def make(mode="lazy", **options):
        devices.append(HostileDevice(1 << 20, mode, **options))
        return devices[-1]

    yield make
    for device in devices:
        device.close()


def test_a_direct_view_is_the_host_memory_and_costs_none_of_the_device(opened):
    device = opened()
    host = device.host_adopt(torch.arange(6.0).view(2, 3))
    with device.accounting():
        view = device.zero_copy_view(host)
        assert view.untyped_storage().data_ptr() == host.untyped_storage().data_ptr()
        assert not view.is_inference()
        view.mul_(2)
        assert device.memory() == 0
    assert torch.equal(host, 2 * torch.arange(6.0).view(2, 3))


def test_a_direct_view_needs_contiguous_memory(opened):
    with pytest.raises(UnsupportedError, match="contiguous"):
        opened().zero_copy_view(torch.zeros(3, 2).T)


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
