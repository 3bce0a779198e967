"""Lanes with a thread each.

Nobody holds a lock while Python code of another thread could want it: queues and flags are such that every access is
one step of the interpreter (atomic under its global lock), and a thread sleeps on a lock of its own until the very task
finishes that it waits for. Copies and fused updates release the interpreter, so that lanes do overlap.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import torch
from typing_extensions import override

from lt_offload.execute.device.base import LOOSE
from lt_offload.execute.device.lanes import Lanes, Task, plain_torch


class _LaneThread:
    """One thread's tasks. Other threads only append to ``tasks`` and put into ``inbox``: nobody takes a lock."""

    __slots__ = ("begun", "inbox", "over", "tasks", "thread")

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        """Tasks to look at; None: stop when all have finished."""
        self.tasks: deque[Task] = deque()
        """Those that have not finished, and maybe one that just has."""
        self.begun = self.over = 0
        """How many tasks it was given, and how many of them have run."""
        self.thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether a task given now would be next in any case."""
        return self.begun == self.over

    def snapshot(self) -> tuple[Task, ...]:
        """Return ``tasks`` as they are at some moment of the call."""
        while True:
            with suppress(RuntimeError):  # another thread changed them meanwhile
                return tuple(self.tasks)


def choose(ready: Sequence[Task]) -> Task:
    """Return the task of ``ready`` (in order of submission) that a lane without an order runs next.

    It is the most urgent one that finds what it reads, or else the first.
    """
    by_urgency = sorted(ready, key=lambda task: task.urgency) if len(ready) > 1 else ready
    return next((task for task in by_urgency if task.arrived()), ready[0])


class ThreadLanes(Lanes):
    """Runs every lane on a thread of its own.

    A thread that cannot go on sleeps until the very task finishes that it waits for; so does the caller in ``finish``.

    Args:
        execute: see :class:`Lanes`.
        threads: how many threads torch may use for one operation, by lane; others: as many as for the caller's.
        prepare: called by every thread before its first task, with the name of its lane.
    """

    def __init__(
        self,
        execute: Callable[[Task], None],
        *,
        threads: Mapping[str, int],
        prepare: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(execute)
        self._threads = threads
        self._prepare = prepare
        self._lanes: dict[str, _LaneThread] = {}
        self._stopping = False

    @override
    def submit(self, task: Task) -> None:
        assert not self._stopping, "the device is closed"
        lane = self._lanes.get(task.lane)
        if lane is None:
            lane = self._lanes[task.lane] = _LaneThread()
            self._start(task.lane, lane)
        task.serial = lane.begun
        lane.begun += 1
        lane.tasks.append(task)
        lane.inbox.put(task)

    @override
    def advance(self) -> None:
        """Nothing to do: the threads need no occasion."""

    def run_here(self, task: Task) -> bool:
        """Run ``task`` on the calling thread if that keeps all orders; return whether it did."""
        lane = self._lanes.get(task.lane)
        if (lane is not None and not lane.idle) or not task.ready():
            return False
        with plain_torch():
            task.finish(self._run(task))
        return True

    @override
    def pending(self, lane: str | None = None) -> list[Task]:
        lanes = [found for name, found in tuple(self._lanes.items()) if lane in (None, name)]
        return [task for found in lanes for task in found.snapshot() if not task.finished]

    @override
    def finish(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            if not task.finished:
                task.join()

    @override
    def stop(self) -> None:
        self._stopping = True
        for lane in self._lanes.values():
            lane.inbox.put(None)
        for lane in self._lanes.values():
            if lane.thread is not None and lane.thread is not threading.current_thread():
                lane.thread.join()
            lane.thread = None

    def _start(self, name: str, lane: _LaneThread) -> None:
        started = threading.Event()
        lane.thread = threading.Thread(
            target=self._work, args=(name, lane, started), name=f"lt_offload {name}", daemon=True
        )
        before = torch.get_num_threads()
        lane.thread.start()
        started.wait()
        if name in self._threads:
            # The worker's choice holds for itself, but torch would also give it to threads that are yet to come.
            torch.set_num_threads(before)

    def _work(self, name: str, lane: _LaneThread, started: threading.Event) -> None:
        try:
            if name in self._threads:
                torch.get_num_threads()  # a thread that asks for the first time is given everybody's number: not later
                torch.set_num_threads(self._threads[name])
            if self._prepare is not None:
                self._prepare(name)
        finally:
            started.set()
        with torch.no_grad():
            if name in LOOSE:
                self._run_by_urgency(lane)
            else:
                self._run_in_order(lane)

    def _run_in_order(self, lane: _LaneThread) -> None:
        while (task := lane.inbox.get()) is not None:
            while (blocker := task.blocker()) is not None:
                blocker.join()
            self._do(task, lane)
            lane.tasks.popleft()
            del task, blocker  # or an idle lane would keep what its last task refers to

    def _run_by_urgency(self, lane: _LaneThread) -> None:
        ready: list[Task] = []
        stopping = False
        while not (stopping and not lane.tasks):
            while not ready or not lane.inbox.empty():
                task = lane.inbox.get()
                if task is None:
                    stopping = True
                    break
                self._consider(task, lane, ready)
            if ready:
                task = choose(ready)
                ready.remove(task)
                self._do(task, lane)
                lane.tasks.remove(task)
            task = None  # or an idle lane would keep what its last task refers to

    def _do(self, task: Task, lane: _LaneThread) -> None:
        error = self._run(task)
        lane.over += 1  # first, so that who has waited for the last task finds the lane idle
        task.finish(error)

    @staticmethod
    def _consider(task: Task, lane: _LaneThread, ready: list[Task]) -> None:
        """Put ``task`` among the ``ready`` ones, or have it come again when what it waits for has finished."""
        if task.finished or task in ready:
            return
        while (blocker := task.blocker()) is not None:
            blocker.waiters.append(partial(lane.inbox.put, task))
            if not blocker.finished:
                return
        bisect.insort(ready, task, key=lambda other: other.serial)
