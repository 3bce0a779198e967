"""Rules of coherence: which copy of a group is newer, and that snapshots are told of writes and read as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lt_offload.errors import CheckpointError, PlanError
from lt_offload.execute.device.base import Device, Event
from lt_offload.execute.memory import snapshots
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.live_group import LiveGroup, needed_by_compute
from lt_offload.execute.memory.residency import Transfer
from lt_offload.execute.memory.snapshots import HostSnapshot, Snapshots
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


def taken(owner: Snapshots, *tensors: Tensor, room: int = 1 << 20) -> HostSnapshot:
    return owner.take({tensor.untyped_storage(): rank for rank, tensor in enumerate(tensors)}, room)


def read(snapshot: HostSnapshot, tensor: Tensor) -> list[float]:
    with snapshot.reading(tensor.untyped_storage()) as storage:
        return torch.empty(0).set_(storage).tolist()


def test_what_is_changed_is_set_aside_and_forgotten_when_it_was_read() -> None:
    owner, one, other = Snapshots(), torch.ones(4), torch.ones(4)
    snapshot = taken(owner, one, other)
    owner.changing([one[:2]])  # a view of it
    one.fill_(2)
    assert owner.nbytes == 16
    assert read(snapshot, one) == [1, 1, 1, 1]
    assert owner.nbytes == 0
    assert read(snapshot, other) == [1, 1, 1, 1]
    assert not owner.wants([one, other])
    owner.changing([other])
    assert owner.nbytes == 0


def test_two_snapshots_share_what_has_not_changed_between_them() -> None:
    owner, tensor = Snapshots(), torch.ones(4)
    first, second = taken(owner, tensor), taken(owner, tensor)
    owner.changing([tensor])
    tensor.fill_(2)
    third = taken(owner, tensor)
    assert owner.nbytes == 16
    owner.changing([tensor])
    tensor.fill_(3)
    assert owner.nbytes == 32
    assert [read(snapshot, tensor)[0] for snapshot in (third, first, second)] == [2, 1, 1]
    assert owner.nbytes == 0


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as somebody waits."""
    seen = threading.Event()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            seen.set()
            return super().wait(timeout)

    class Module:
        pass

    module = Module()
    module.Condition = Condition  # type: ignore[attr-defined]
    monkeypatch.setattr(snapshots, "threading", module)
    return seen


@pytest.mark.parametrize("end", [read, lambda snapshot, tensor: snapshot.close()], ids=["read", "closed"])
def test_without_room_a_change_waits_for_the_reader(
    end: Callable[[HostSnapshot, Tensor], object], waiting: threading.Event
) -> None:
    owner, tensor = Snapshots(), torch.ones(4)
    snapshot = taken(owner, tensor, room=15)
    found: list[object] = []

    def reader() -> None:
        waiting.wait()
        found.append(end(snapshot, tensor))

    thread = threading.Thread(target=reader)
    thread.start()
    owner.changing([tensor])
    tensor.fill_(2)
    thread.join()
    assert found in ([[1, 1, 1, 1]], [None])
    assert owner.nbytes == 0


def test_a_change_waits_while_it_is_being_read(waiting: threading.Event) -> None:
    owner, tensor = Snapshots(), torch.ones(4)
    snapshot = taken(owner, tensor)

    def change() -> None:
        owner.changing([tensor])
        tensor.fill_(2)
        waiting.set()  # had it not waited, this would be seen below

    with snapshot.reading(tensor.untyped_storage()):
        thread = threading.Thread(target=change)
        thread.start()
        waiting.wait()
        assert tensor.tolist() == [1, 1, 1, 1]
    thread.join()
    assert tensor.tolist() == [2, 2, 2, 2]
    assert owner.nbytes == 0


def test_nothing_is_read_when_changes_are_no_longer_announced() -> None:
    owner, one, other = Snapshots(), torch.ones(4), torch.ones(4)
    snapshot = taken(owner, one, other, room=0)
    with (
        pytest.raises(CheckpointError, match="training was left before all of it had been read"),
        snapshot.reading(one.untyped_storage()),
    ):
        owner.end()
    with pytest.raises(CheckpointError, match="was left"):
        read(snapshot, other)
    owner.changing([one, other])  # waits for nobody
    snapshot.close()
