"""Contents of storages for a reader on another thread: read in place, set aside, or waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lt_offload.errors import CheckpointError
from lt_offload.execute.memory import snapshots
from lt_offload.execute.memory.snapshots import HostSnapshot, Snapshots


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
