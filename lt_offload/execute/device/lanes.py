"""Tasks of lanes, and how to run them on the calling thread: as late as possible, or in random order.

The tasks of a lane run in the order of submission, except on the lanes ``host`` and ``peers``, which take the most
urgent one that may run: nothing orders two of their tasks but what they run after.

A task runs after everything in ``after`` and ``behind`` has finished. If something in ``after`` failed, the task is
cancelled with the same error; ``behind`` is order only. When a task fails, what its lane is given until the error has
been reported to the caller is cancelled too.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from lt_offload.compat.torch import dispatch_modes, without_dispatch_modes
from lt_offload.execute.device.base import LOOSE

UNORDERED = "unordered"
"""A lane whose tasks have no order among themselves."""
_LOOSE = (UNORDERED, *LOOSE)
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
        "serial",
        "urgency",
        "waiters",
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
        """On lanes without an order the task with the smallest one runs first."""
        self.serial = 0
        """Position among the tasks of its lane; owned by the lane."""
        self.finished = False
        self.waiters: list[Callable[[], object]] = []
        """Called when the task has finished. Who adds itself looks at ``finished`` afterwards."""
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
        return self.blocker() is None

    def blocker(self) -> Task | None:
        """Return a task that has to finish first, None if there is none."""
        for tasks in (self.after, self.behind):
            for task in tasks:
                if not task.finished:
                    return task
        return None

    def arrived(self) -> bool:
        """Return whether a task that is ready would find what it reads there at once."""
        return True

    def done(self) -> bool:
        """Return whether nothing of the work is going on or to come, be it complete, failed or cancelled."""
        return self.finished

    def finish(self, error: BaseException | None) -> None:
        """Record the outcome, let go of everything the task refers to, and wake who waits for it."""
        self.error = error
        self.work = None
        self.after = self.behind = ()
        self.finished = True
        for wake in self.waiters:
            wake()
        self.waiters.clear()

    def join(self) -> None:
        """Block the calling thread until another one has finished the task."""
        if not self.finished:
            gate = threading.Lock()
            gate.acquire()
            self.waiters.append(gate.release)
            if not self.finished:
                gate.acquire()


def _nothing() -> None:
    pass


def plain_torch() -> AbstractContextManager[Any]:
    """Run without autograd, inference mode, dispatch modes and autocast, whatever the calling thread is inside."""
    casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if torch.is_inference_mode_enabled() or dispatch_modes() or casts:
        return _plain()
    # Nearly always; every context that is entered costs microseconds.
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _plain() -> Iterator[None]:
    host, gpu = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes(), host, gpu:
        yield


class GaveUp(Exception):
    """A task had waited for other processes when another task of this one failed, whose error is the one to report."""


class Lanes(ABC):
    """Runs tasks.

    Args:
        execute: does the work of one task; whatever it raises is the task's failure.
    """

    def __init__(self, execute: Callable[[Task], None]) -> None:
        self._execute = execute
        self._errors = threading.Lock()
        self._error: BaseException | None = None
        self.failed = False
        """Whether some task has failed, reported or not."""
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
        error = self._take_error() if self._error is not None else None
        if error is None:
            for task in tasks:
                if task.error is not None:
                    error = task.error
                    break
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback refers to this frame

    def stop(self) -> None:
        """Run what is queued and end all threads; idempotent."""
        self.finish(self.pending())

    def _take_error(self) -> BaseException | None:
        """Return the first error that was not reported yet, and cancel what its lanes were given meanwhile."""
        with self._errors:
            error, self._error = self._error, None
            if error is not None:
                for lane in self._broken:
                    for task in self.pending(lane):
                        task.error = error
                self._broken.clear()
        return error

    def _run(self, task: Task) -> BaseException | None:
        """Do or cancel the work of ``task``; return its error."""
        # The lane first: ``check`` marks its tasks before it mends the lane.
        error = self._broken.get(task.lane) or task.error
        error = error or next((t.error for t in task.after if t.error is not None), None)
        if error is None:
            try:
                self._execute(task)
            except GaveUp as raised:
                error = raised
            except BaseException as raised:  # it belongs to whoever waits for the task
                error = raised
                with self._errors:
                    self._broken[task.lane] = raised
                    self._error = self._error or raised
                    self.failed = True  # last: who sees it finds the error
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
