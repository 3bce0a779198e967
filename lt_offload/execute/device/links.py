"""The emulated device's links to the host: how long bytes take on them. Knows no memory and no order of tasks.

One link per direction; both work at the same time. What a computation itself reads or writes in host memory goes first,
at the full speed of the link; copies pause meanwhile. Nothing is computed meanwhile either: real hardware would hide
part of the access behind arithmetic.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from lt_offload.execute.device.lanes import UNORDERED, Task


class _Link:
    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.release_after = 0.0
        """When the last access of a computation ends."""
        self.taken = 0.0
        """Seconds of all accesses of computations."""


class LinkRunner:
    """Does the work of a task, no faster than its lane's link.

    Args:
        rates: bytes per second by lane; lanes without one are not slowed down.
    """

    def __init__(self, rates: Mapping[str, float | None]) -> None:
        self._links = {lane: _Link(rate) for lane, rate in rates.items() if rate is not None}
        self.recording = False
        self.spans: deque[tuple[int, str, str, float, float]] = deque()

    def __call__(self, task: Task) -> None:
        """Run ``task``."""
        assert task.work is not None
        start = time.perf_counter()
        link = self._links.get(task.lane)
        if link is None:
            task.work()
        else:
            taken = link.taken - max(0.0, link.release_after - start)
            task.work()
            release_after = start + task.nbytes / link.bytes_per_s - taken
            while (left := release_after + link.taken - time.perf_counter()) > 0:
                time.sleep(left)
        if self.recording and task.lane != UNORDERED:
            self.spans.append((task.op, task.lane, task.label, start, time.perf_counter()))

    def cross(self, lane: str, nbytes: int) -> None:
        """Block the calling thread, which computes, until it has moved ``nbytes`` over the link of ``lane``."""
        link = self._links.get(lane)
        if link is not None:
            seconds = nbytes / link.bytes_per_s
            link.release_after = time.perf_counter() + seconds
            link.taken += seconds
            time.sleep(seconds)
