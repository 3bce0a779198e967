"""Rules of coherence: which copy of a group is newer, who may read it where, and that snapshots are told of writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lt_offload.errors import PlanError
from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.live_group import LiveGroup, needed_by_compute
from lt_offload.execute.memory.residency import Transfer
from lt_offload.execute.memory.snapshots import Snapshots
from lt_offload.execute.memory.tensors import Weight
from tests.support.hostile.device import HostileDevice


@pytest.fixture(params=["lazy", "thread"])
def device(request: pytest.FixtureRequest) -> Iterator[HostileDevice]:
    device = HostileDevice(1 << 16, request.param, check=True)
    device.reserve(1 << 12)
    yield device
    device.close()


@pytest.fixture
def group(device: HostileDevice) -> LiveGroup:
    """On the device, where it was fetched to."""
    weight = Weight(0, "w", nn.Parameter(torch.ones(8)))
    (group,) = Layout(device, [weight], [[weight]], None).all
    group.snapshots = Snapshots()
    group.attach(device.allocate(group.room))
    Transfer(device, [group], label="fetch").fetch()
    return group


def _update(device: Device, group: LiveGroup, *, told: bool) -> Event:
    def run() -> None:
        if told:
            group.about_to_write()
        group.host.fill_(7)

    after = [event for event in (group.last_fetch,) if event is not None]
    return device.submit("host", run, after=after, writes=[group.host_cell], label="update")


def test_a_newer_device_copy_is_not_lost(group: LiveGroup) -> None:
    needed_by_compute(group.device, [group], by="a test", write=True)
    group.changed_on_device()
    assert not group.complete_on_host
    with pytest.raises(AssertionError, match=r"weight w would be lost"):
        group.detach()
    with pytest.raises(AssertionError, match=r"weight w would be overwritten by an older copy"):
        group.fetched_by(group.device.mark())
    with pytest.raises(AssertionError, match="changed on the host, where it is out of date"):
        group.updated_on_host_by(group.device.mark())
    with pytest.raises(PlanError, match="a test reads weight w in host memory, which is older"):
        needed_by_compute(group.device, [], [group], by="a test")
    Transfer(group.device, [group], label="back").write_back()
    group.detach()
    needed_by_compute(group.device, [], [group], by="a test")


def test_a_device_copy_that_the_host_has_overtaken_is_not_used(group: LiveGroup) -> None:
    needed_by_compute(group.device, [group], by="a test")
    group.updated_on_host_by(_update(group.device, group, told=True))
    with pytest.raises(PlanError, match="a test reads weight w on the device, which is older"):
        needed_by_compute(group.device, [group], by="a test")
    with pytest.raises(AssertionError, match="changed on the device, where it is out of date"):
        group.changed_on_device()
    group.detach()
    with pytest.raises(PlanError, match="does not bring weight w to the device for a test"):
        needed_by_compute(group.device, [group], by="a test")
    group.device.drain()
    group.awaited_on_host()
    assert group.complete_on_host


@pytest.mark.parametrize("told", [True, False])
def test_a_task_that_writes_without_a_word_is_found(group: LiveGroup, told: bool) -> None:
    assert group.snapshots is not None
    group.device.drain()
    storages = {host.untyped_storage(): 0 for host in group.hosts}
    snapshot = group.snapshots.take(storages, 1 << 16)
    _update(group.device, group, told=told)
    if not told:
        with pytest.raises(AssertionError, match="a snapshot of it had not been told"):
            group.device.drain()
        return
    group.device.drain()
    for storage in storages:
        with snapshot.reading(storage) as contents:
            assert bytes(contents) != bytes(storage)
