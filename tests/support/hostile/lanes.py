"""Lanes that run tasks on the calling thread: as late as possible, or in random order."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import override

from lt_offload.execute.device.lanes import LOOSE, Lanes, Task, plain_torch

UNORDERED = "unordered"
"""A lane whose tasks have no order among themselves."""
_LOOSE = (UNORDERED, *LOOSE)
"""Lanes whose tasks need not run in the order of submission."""


class CallerLanes(Lanes):
    """Runs tasks on the calling thread. Deterministic.

    Without a seed a task runs only when somebody must have it: as late as possible. With one, some tasks that might run
    do run at every occasion.
    """

    def __init__(self, execute: Callable[[Task], None], seed: int | None = None) -> None:
        super().__init__(execute, threads={})
        self._random = None if seed is None else random.Random(seed)
        self._queues: defaultdict[Any, deque[Task]] = defaultdict(deque)

    @override
    def submit(self, task: Task) -> None:
        self._queue_of(task).append(task)
        self.advance()

    @override
    def pending(self, lane: str | None = None) -> list[Task]:
        return [t for queue in self._queues.values() for t in queue if lane in (None, t.lane)]

    def advance(self) -> None:
        """Give tasks an occasion to run."""
        if self._random is None:
            return
        while self._random.random() < 0.5 and (heads := self._ready()):
            self._run_head(self._random.choice(heads))

    @override
    def finish(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            if self._random is None:
                self._force(task)
            else:
                while not task.finished:
                    self._run_head(self._random.choice(self._ready()))

    @override
    def stop(self) -> None:
        self.finish(self.pending())

    def _queue_of(self, task: Task) -> deque[Task]:
        return self._queues[task if task.lane in _LOOSE else task.lane]

    def _ready(self) -> list[Task]:
        return [queue[0] for queue in self._queues.values() if queue and queue[0].ready()]

    def _force(self, target: Task) -> None:
        wanted = [target]
        while wanted:
            if wanted[-1].finished:
                wanted.pop()
                continue
            head = self._queue_of(wanted[-1])[0]
            blocker = next((t for t in (*head.after, *head.behind) if not t.finished), None)
            if blocker is None:
                self._run_head(head)
            else:
                wanted.append(blocker)

    def _run_head(self, task: Task) -> None:
        self._queue_of(task).popleft()
        if task.lane in _LOOSE:
            del self._queues[task]
        with plain_torch():
            task.finish(self._run(task))
        if self._random is None:
            # Unordered tasks clean up after others: the sooner they run, the sooner a late use is noticed.
            for key in [key for key in self._queues if isinstance(key, Task) and key.lane == UNORDERED]:
                if key.ready() and not key.finished:
                    self._run_head(key)
