"""Tasks, and the lanes that run them: a thread per lane.

The tasks of a lane run in the order of submission, except on the lanes ``host`` and ``peers``, which take the most
urgent one that may run: nothing orders two of their tasks but what they run after.

A task runs after everything in ``after`` and ``behind`` has finished. If something in ``after`` failed, the task is
cancelled with the same error; ``behind`` is order only. When a task fails, what its lane is given until the error has
been reported to the caller is cancelled too.

Nobody holds a lock while Python code of another thread could want it: queues and flags are such that every access is
one step of the interpreter (atomic under its global lock), and a thread sleeps on a lock of its own until the very task
finishes that it waits for. Copies and fused updates release the interpreter, so that lanes do overlap.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Self

import torch

from lt_offload.compat.torch import dispatch_modes, without_dispatch_modes

Lane = Literal["h2d", "d2h", "host", "peers", "parts", "network"]

WAITING: frozenset[Lane] = frozenset({"peers", "parts"})
"""Lanes that do nothing but wait for other processes."""
ON_HOST: frozenset[Lane] = WAITING | {"host", "network"}
"""Lanes whose tasks run on a thread of this process."""
LOOSE: frozenset[Lane] = frozenset({"host", "peers"})
"""Lanes whose tasks need not run in the order of submission: nothing orders two of them but what they run after."""


class Task:
    """Some work on a lane, and the event of its completion."""

    __slots__ = (
        "__weakref__",
        "after",
        "behind",
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

    @classmethod
    def past(cls, lane: str, label: str) -> Self:
        """Return a task that has run already."""
        task = cls(lane, lambda: None, label=label)
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
            # Asked again: had it finished in between, nobody would open the gate.
            if not self.finished:
                gate.acquire()


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


Span = tuple[int, str, str, float, float]
"""Op, lane, label, start and end of a task or computation."""


class TaskRunner:
    """Does the work of tasks, and notes when; times are in seconds on the host's clock."""

    def __init__(self) -> None:
        self.recording = False
        self.spans: deque[Span] = deque()

    def __call__(self, task: Task) -> None:
        """Run ``task``."""
        assert task.work is not None
        start = time.perf_counter()
        task.work()
        if self.recording:
            self.spans.append((task.op, task.lane, task.label, start, time.perf_counter()))

    def record(self, enabled: bool) -> None:
        """Start or stop collecting spans."""
        self.recording = enabled

    def begin(self, op: int, label: str) -> Any:
        """Note that a computation starts; returns what :meth:`end` wants."""
        return op, "compute", label, time.perf_counter()

    def end(self, token: Any) -> None:
        """Note that it ends."""
        self.spans.append((*token, time.perf_counter()))

    def take_spans(self) -> list[Span]:
        """Return the spans that are over, and forget them."""
        return [self.spans.popleft() for _ in range(len(self.spans))]


class GaveUp(Exception):
    """A task had waited for other processes when another task of this one failed, whose error is the one to report."""


class _LaneThread:
    """One thread's tasks. Other threads only append to ``tasks`` and put into ``inbox``: nobody takes a lock."""

    __slots__ = ("begun", "inbox", "over", "tasks", "thread")

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        """Tasks to look at; None: stop when all have finished."""
        self.tasks: deque[Task] = deque()
        """Unfinished tasks; the first may have finished a moment ago."""
        self.begun = self.over = 0
        """Numbers of tasks that it was given, and of those that have run."""
        self.thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """True if a task given now would be next in any case."""
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


class Lanes:
    """Runs every lane on a thread of its own.

    A thread that cannot go on sleeps until the very task finishes that it waits for; so does the caller in ``finish``.
    Whatever ``execute`` raises is the task's failure. ``threads`` says, by lane, how many threads torch may use for one
    operation; others: as many as for the caller's. ``prepare`` is called by every thread before its first task, with
    the name of its lane.
    """

    def __init__(
        self,
        execute: Callable[[Task], None],
        *,
        threads: Mapping[str, int],
        prepare: Callable[[str], object] | None = None,
    ) -> None:
        self._execute = execute
        self._errors = threading.Lock()
        self._error: BaseException | None = None
        self.failed = False
        """True if some task has failed, reported or not."""
        self._broken: dict[str, BaseException] = {}
        self._threads = threads
        self._prepare = prepare
        self._lanes: dict[str, _LaneThread] = {}
        self._stopping = False

    def submit(self, task: Task) -> None:
        """Queue ``task``."""
        assert not self._stopping, "the device is closed"
        lane = self._lanes.get(task.lane)
        if lane is None:
            lane = self._lanes[task.lane] = _LaneThread()
            self._start(task.lane, lane)
        task.serial = lane.begun
        lane.begun += 1
        lane.tasks.append(task)
        lane.inbox.put(task)

    def run_here(self, task: Task) -> bool:
        """Run ``task`` on the calling thread if that keeps all orders; return whether it did."""
        lane = self._lanes.get(task.lane)
        if (lane is not None and not lane.idle) or not task.ready():
            return False
        with plain_torch():
            task.finish(self._run(task))
        return True

    def pending(self, lane: str | None = None) -> list[Task]:
        """Return the unfinished tasks of ``lane``, or of all."""
        lanes = [thread for name, thread in tuple(self._lanes.items()) if lane in (None, name)]
        return [task for thread in lanes for task in thread.snapshot() if not task.finished]

    def finish(self, tasks: Iterable[Task]) -> None:
        """Block until ``tasks`` have finished; errors stay for :meth:`check`."""
        for task in tasks:
            if not task.finished:
                task.join()

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
        self._stopping = True
        for lane in self._lanes.values():
            lane.inbox.put(None)
        for lane in self._lanes.values():
            if lane.thread is not None and lane.thread is not threading.current_thread():
                lane.thread.join()
            lane.thread = None

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
