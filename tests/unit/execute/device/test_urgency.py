"""The host lane runs what is most urgent of what may run; other lanes keep their order."""

from __future__ import annotations

import threading

from tests.support.hostile.device import HostileDevice


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
