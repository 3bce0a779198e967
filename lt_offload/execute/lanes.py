"""Queues of tasks, one per lane, and the ways to run them: late, in random order, or on threads. Knows no memory.

The tasks of a lane run in the order of submission, except on the ``host`` lane, which takes the most urgent one that
may run: nothing orders two of its tasks but what they run after.

A task runs after everything in ``after`` and ``behind`` has finished. If something in ``after`` failed, the task is
cancelled with the same error; ``behind`` is order only. When a task fails, what its lane is given until the error has
been reported to the caller is cancelled too.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

UNORDERED = "unordered"
"""A lane whose tasks have no order among themselves."""
_LOOSE = (UNORDERED, "host")
"""Lanes whose tasks need not run in the order of submission."""


class Task:
    """Some work on a lane, and the event of its completion."""

    __slots__ = (
        "__weakref__",
        "after",
        "behind",
        "clock",
        "error",
        "finished",
        "label",
        "lane",
        "nbytes",
        "op",
        "urgency",
        "work",
    )

    def __init__(
        self,
        lane: str,
        work: Callable[[], None],
        *,
        after: Sequence[Task] = (),
        behind: Sequence[Task] = (),
        label: str = "",
        op: int = -1,
        nbytes: int = 0,
        urgency: int = 0,
    ) -> None:
        self.lane = lane
        self.work: Callable[[], None] | None = work
        self.after = tuple(after)
        self.behind = tuple(behind)
        self.label = label
        self.op = op
        self.nbytes = nbytes
        self.urgency = urgency
        """On the host lane the task with the smallest one runs first."""
        self.finished = False
        self.error: BaseException | None = None
        self.clock: tuple[int, ...] = ()
        """Owned by the happens-before checker."""

    @classmethod
    def past(cls, lane: str, label: str) -> Task:
        """Return a task that has run already."""
        task = cls(lane, _nothing, label=label)
        task.finish(None)
        return task

    def ready(self) -> bool:
        """Return whether the task may run now, as far as other tasks are concerned."""
        return all(t.finished for t in self.after) and all(t.finished for t in self.behind)

    def arrived(self) -> bool:
        """Return whether a task that is ready would find what it reads there at once."""
        return True

    def done(self) -> bool:
        """Return whether nothing of the work is going on or to come, be it complete, failed or cancelled."""
        return self.finished

    def finish(self, error: BaseException | None) -> None:
        """Record the outcome and let go of everything the task refers to."""
        self.error = error
        self.work = None
        self.after = self.behind = ()
        self.finished = True


def _nothing() -> None:
    pass


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run without autograd, inference mode, dispatch modes and autocast, whatever the calling thread is inside."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                yield
        else:
            yield


class Lanes(ABC):
    """Runs tasks.

    Args:
        execute: does the work of one task; whatever it raises is the task's failure.
    """

    def __init__(self, execute: Callable[[Task], None]) -> None:
        self._execute = execute
        self._errors = threading.Lock()
        self._error: BaseException | None = None
        self._broken: dict[str, BaseException] = {}

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Queue ``task``."""

    @abstractmethod
    def advance(self) -> None:
        """Give tasks an occasion to run."""

    @abstractmethod
    def finish(self, tasks: Iterable[Task]) -> None:
        """Block until ``tasks`` have finished; errors stay for :meth:`check`."""

    @abstractmethod
    def pending(self, lane: str | None = None) -> list[Task]:
        """Return the unfinished tasks of ``lane``, or of all."""

    def check(self, tasks: Iterable[Task] = ()) -> None:
        """Raise the first error that was not reported yet, else the error of the first failed one of ``tasks``."""
        with self._errors:
            error, self._error = self._error, None
            if error is not None:
                for lane in self._broken:
                    for task in self.pending(lane):
                        task.error = error
                self._broken.clear()
        if error is None:
            error = next((t.error for t in tasks if t.error is not None), None)
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback refers to this frame

    def stop(self) -> None:
        """Run what is queued and end all threads; idempotent."""
        self.finish(self.pending())

    def _run(self, task: Task) -> BaseException | None:
        """Do or cancel the work of ``task``; return its error."""
        # The lane first: ``check`` marks its tasks before it mends the lane.
        error = self._broken.get(task.lane) or task.error
        error = error or next((t.error for t in task.after if t.error is not None), None)
        if error is None:
            try:
                self._execute(task)
            except BaseException as raised:  # it belongs to whoever waits for the task
                error = raised
                with self._errors:
                    self._broken[task.lane] = raised
                    self._error = self._error or raised
        return error


class CallerLanes(Lanes):
    """Runs tasks on the calling thread. Deterministic.

    Without a seed a task runs only when somebody must have it: as late as possible. With one, some tasks that might run
    do run at every occasion.
    """

    def __init__(self, execute: Callable[[Task], None], seed: int | None = None) -> None:
        super().__init__(execute)
        self._random = None if seed is None else random.Random(seed)
        self._queues: defaultdict[Any, deque[Task]] = defaultdict(deque)

    @override
    def submit(self, task: Task) -> None:
        self._queue_of(task).append(task)
        self.advance()

    @override
    def pending(self, lane: str | None = None) -> list[Task]:
        return [t for queue in self._queues.values() for t in queue if lane in (None, t.lane)]

    @override
    def advance(self) -> None:
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


def _next(queue: deque[Task]) -> Task | None:
    """Return the task of one lane's ``queue`` that has to run now, None if it is too early for any."""
    if not queue or queue[0].lane != "host":
        return queue[0] if queue and queue[0].ready() else None
    ready = [task for task in queue if task.ready()]
    arrived = [task for task in ready if task.arrived()] or ready[:1]
    return min(arrived, key=lambda task: task.urgency, default=None)


class ThreadLanes(Lanes):
    """Runs every lane on a thread of its own.

    Args:
        execute: see :class:`Lanes`.
        threads: how many threads torch may use for one operation, by lane; others: as many as for the caller's.
    """

    def __init__(self, execute: Callable[[Task], None], *, threads: Mapping[str, int]) -> None:
        super().__init__(execute)
        self._threads = threads
        self._queues: dict[str, deque[Task]] = {}
        self._workers: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._stopping = False

    @override
    def submit(self, task: Task) -> None:
        assert not self._stopping, "the device is closed"
        with self._changed:
            queue = self._queues.get(task.lane)
            if queue is not None:
                queue.append(task)
                self._changed.notify_all()
                return
            queue = self._queues[task.lane] = deque([task])
        self._start(task.lane, queue)

    @override
    def advance(self) -> None:
        """Nothing to do: the threads need no occasion."""

    def run_here(self, task: Task) -> bool:
        """Run ``task`` on the calling thread if that keeps all orders; return whether it did."""
        if self._queues.get(task.lane) or not task.ready():
            return False
        with plain_torch():
            task.finish(self._run(task))
        return True

    @override
    def pending(self, lane: str | None = None) -> list[Task]:
        with self._changed:
            return [t for name, queue in self._queues.items() if lane in (None, name) for t in queue]

    @override
    def finish(self, tasks: Iterable[Task]) -> None:
        rest = [t for t in tasks if not t.finished]
        if rest:
            with self._changed:
                self._changed.wait_for(lambda: all(t.finished for t in rest))

    @override
    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()
        self._workers.clear()

    def _start(self, lane: str, queue: deque[Task]) -> None:
        started = threading.Event()
        worker = threading.Thread(
            target=self._loop, args=(lane, queue, started), name=f"lt_offload {lane}", daemon=True
        )
        self._workers.append(worker)
        before = torch.get_num_threads()
        worker.start()
        started.wait()
        if lane in self._threads:
            # The worker's choice holds for itself, but torch would also give it to threads that are yet to come.
            torch.set_num_threads(before)

    def _loop(self, lane: str, queue: deque[Task], started: threading.Event) -> None:
        if lane in self._threads:
            torch.set_num_threads(self._threads[lane])
        started.set()
        with torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: _next(queue) or (self._stopping and not queue))
                    task = _next(queue)
                    if task is None:
                        return
                error = self._run(task)
                with self._changed:
                    task.finish(error)
                    queue.remove(task)
                    self._changed.notify_all()
                del task, error  # or an idle lane would keep what its last task refers to
