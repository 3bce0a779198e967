"""Links between host and emulated device that have a speed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from typing_extensions import override

from lt_offload.execute.device.lanes import Task, TaskRunner


class _Link:
    """The bytes per second of one direction, and how much of its time computations have taken."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_until = 0.0
        """When the last access of a computation ends."""
        self.taken = 0.0
        """Seconds of all accesses of computations."""


class LinkRunner(TaskRunner):
    """Does the work of a task, no faster than its lane's link.

    There is one link per direction; both work at the same time. What a computation itself reads or writes in host
    memory goes first, at the full speed of the link; copies pause meanwhile. Nothing is computed meanwhile either: real
    hardware would hide part of the access behind arithmetic.

    Args:
        rates: bytes per second by lane; lanes without one are not slowed down.
    """

    def __init__(self, rates: Mapping[str, float | None]) -> None:
        super().__init__()
        self._links = {lane: _Link(rate) for lane, rate in rates.items() if rate is not None}

    @override
    def __call__(self, task: Task) -> None:
        link = self._links.get(task.lane)
        if link is None:
            super().__call__(task)
            return
        assert task.work is not None
        start = time.perf_counter()
        taken = link.taken - max(0.0, link.busy_until - start)
        task.work()
        end = start + task.nbytes / link.bytes_per_s - taken
        while (left := end + link.taken - time.perf_counter()) > 0:
            time.sleep(left)
        if self.recording:
            self.spans.append((task.op, task.lane, task.label, start, time.perf_counter()))

    def cross(self, lane: str, nbytes: int) -> None:
        """Block the calling thread, which computes, until it has moved ``nbytes`` over the link of ``lane``."""
        link = self._links.get(lane)
        if link is not None:
            seconds = nbytes / link.bytes_per_s
            link.busy_until = time.perf_counter() + seconds
            link.taken += seconds
            time.sleep(seconds)
