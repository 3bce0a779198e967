"""The host lane runs what is most urgent of what may run; other lanes keep their order."""

from __future__ import annotations

import threading

import pytest

from lt_offload.execute.device.base import Cell
from lt_offload.execute.device.lanes import Task, choose
from tests.support.hostile.device import HostileDevice
from tests.support.hostile.races import Race


def test_the_most_urgent_update_runs_first() -> None:
    device = HostileDevice(1024, "thread")
    log: list[str] = []
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
    device.close()


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_copies_keep_their_order(lane: str) -> None:
    device = HostileDevice(1024, "thread")
    log: list[int] = []
    for at in range(5):
        device.submit(lane, lambda at=at: log.append(at), urgency=-at)  # type: ignore[arg-type]
    device.drain()
    assert log == [0, 1, 2, 3, 4]
    device.close()


class Slow(Task):
    """A task whose inputs have not come yet."""

    def arrived(self) -> bool:
        return False


def test_what_is_there_goes_before_what_is_still_on_its_way() -> None:
    on_its_way = Slow("host", lambda: None, urgency=0)
    there = Task("host", lambda: None, urgency=5)
    assert choose([on_its_way, there]) is there
    assert choose([on_its_way]) is on_its_way
    assert choose([there, Task("host", lambda: None, urgency=4), on_its_way]).urgency == 4
    assert choose([Slow("host", lambda: None, urgency=7), on_its_way]).urgency == 7


@pytest.mark.parametrize("ordered", [True, False])
def test_two_updates_of_one_weight_have_to_be_ordered_by_an_event(ordered: bool) -> None:
    device = HostileDevice(1024, "random", seed=1, check=True)
    weight = Cell("weight")
    first = device.submit("host", lambda: None, writes=[weight], op=1, label="one")
    if ordered:
        device.submit("host", lambda: None, writes=[weight], op=2, label="two", after=[first])
    else:
        with pytest.raises(Race, match='"two" on host writes .weight., not ordered after: "one" on host'):
            device.submit("host", lambda: None, writes=[weight], op=2, label="two")
    device.drain()
    device.close()
