"""Tasks of a CUDA device: copies are issued to streams, updates run on the host, events say when either is over.

A task keeps the memory of its work alive until the GPU is through with it, or until the compute lane is ordered after
it: torch's allocator would otherwise hand the memory to a kernel while a copy stream still uses it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from lt_offload.execute.device.base import Event
from lt_offload.execute.device.cuda_runtime import CudaRuntime
from lt_offload.execute.device.lanes import ON_HOST, Span, Task, TaskRunner


class CudaTask(Task):
    """A task, or a mark of the compute lane (finished from the start), with its GPU side."""

    __slots__ = ("completion", "keeps", "position", "stream")

    def __init__(self, lane: str, work: Callable[[], None], **options: Any) -> None:
        super().__init__(lane, work, **options)
        self.completion: Any = None
        """CUDA event behind the work; None as long as it is not issued, and for work on the host."""
        self.stream: StreamState | None = None
        """The stream on which ``completion`` was recorded."""
        self.position = 0
        """Number of this completion among those of ``stream``."""
        self.keeps: Callable[[], None] | None = None
        """The work, and with it the memory it uses, until the GPU is through or the compute lane ordered after it."""

    @override
    def arrived(self) -> bool:
        return all(event.over() for event in tasks_of(self.after)) and all(e.over() for e in tasks_of(self.behind))

    @override
    def done(self) -> bool:
        return self.finished and self.over()

    def over(self) -> bool:
        """Return whether the GPU is through with what has been issued."""
        return self.completion is None or bool(self.completion.query())


def tasks_of(events: Sequence[Event]) -> list[CudaTask]:
    """Return ``events`` as what they are on this device."""
    if not events:
        return []
    tasks = [event for event in events if isinstance(event, CudaTask)]
    assert len(tasks) == len(events), "an event of another device"
    return tasks


class _Completion(weakref.ref[CudaTask]):
    """A CUDA event, and the task it was recorded for as long as somebody refers to that."""

    __slots__ = ("event",)
    event: Any


class Completions:
    """CUDA events behind tasks; those of tasks that nobody refers to any more are recorded anew, as new ones cost more.

    A stream that was made to wait for one still waits for what it stood for then: CUDA takes the state of an event when
    the wait is issued.
    """

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._lent: set[_Completion] = set()
        self._spare: deque[_Completion] = deque()

    def event(self, task: CudaTask) -> Any:
        """Return an event for ``task``, of which there is one."""
        try:
            spare = self._spare.pop()
        except IndexError:
            event = self._cuda.event(timing=False)
        else:
            self._lent.remove(spare)
            event = spare.event
        # Told by the deque itself: a finalizer in Python would lose the Ctrl-C that comes while it runs.
        lent = _Completion(task, self._spare.append)
        lent.event = event
        self._lent.add(lent)
        return event


class StreamState:
    """A stream, and which completions of other streams it is ordered after already. Used by one thread at a time."""

    __slots__ = ("_after", "_completions", "_count", "cuda_stream")

    def __init__(self, stream: Any, completions: Completions) -> None:
        self.cuda_stream = stream
        self._completions = completions
        self._count = 0
        self._after: dict[StreamState, int] = {}
        """By other stream, the last of its completions that this one comes after; so it comes after all before, too."""

    def follow(self, task: CudaTask) -> None:
        """Order what the stream is given from now on after ``task``, unless it is so anyway."""
        stream = task.stream
        if stream is not None and stream is not self and self._after.get(stream, 0) < task.position:
            self.cuda_stream.wait_event(task.completion)
            self._after[stream] = task.position

    def complete(self, task: CudaTask) -> None:
        """Record an event behind everything the stream has been given so far: the completion of ``task``."""
        event = self._completions.event(task)
        event.record(self.cuda_stream)
        self._count += 1
        task.position, task.completion = self._count, event
        task.stream = self  # last: other threads take a task with a stream for one with an event and a position


class Clock:
    """Times of CUDA events on the host's clock.

    CUDA tells the milliseconds between two events, in single precision: after an hour it could not tell less than 0.25
    ms apart. So times are counted from an event of this iteration, which was recorded at a known time of the host's
    clock on a stream that has nothing else to do.
    """

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._idle: Any = None
        self.spare: deque[Any] = deque()
        """Timing events to be used again."""
        self._zero: tuple[float, Any] = (0.0, None)

    def reset(self) -> None:
        """Count from now on."""
        if self._idle is None:
            self._idle = self._cuda.stream()
        origin = self._cuda.event(timing=True)
        origin.record(self._idle)
        self._zero = (time.perf_counter(), origin)

    def stamp(self, stream: Any) -> tuple[Any, tuple[float, Any]]:
        """Return a moment of ``stream``."""
        event = self.spare.pop() if self.spare else self._cuda.event(timing=True)
        event.record(stream)
        return event, self._zero

    @staticmethod
    def past(stamp: tuple[Any, tuple[float, Any]]) -> bool:
        """Return whether the moment of ``stamp`` is past."""
        event, (_, origin) = stamp
        return bool(event.query() and origin.query())

    @staticmethod
    def seconds(stamp: tuple[Any, tuple[float, Any]]) -> float:
        """Return the time of a stamp that is past, in seconds on the host's clock."""
        event, (zero, origin) = stamp
        return zero + float(origin.elapsed_time(event)) / 1e3


class CudaTaskRunner(TaskRunner):
    """Issues copies to their streams and runs updates on the host."""

    def __init__(self, cuda: CudaRuntime, streams: Mapping[str, StreamState]) -> None:
        super().__init__()
        self._cuda = cuda
        self._streams = streams
        self._in_flight: dict[str, deque[CudaTask]] = {lane: deque() for lane in streams}
        self._clock = Clock(cuda)
        self._on_gpu: deque[tuple[int, str, str, Any, Any]] = deque()

    @override
    def __call__(self, task: Task) -> None:
        assert isinstance(task, CudaTask) and task.work is not None
        if task.lane not in ON_HOST:
            self._issue(task, task.work)
            return
        # A copy has finished when it is issued: without this, an update would read memory that it has not filled yet.
        for event in tasks_of((*task.after, *task.behind)):
            if event.completion is not None:
                event.completion.synchronize()
        super().__call__(task)

    def _issue(self, task: CudaTask, work: Callable[[], None]) -> None:
        stream, start = self._streams[task.lane], None
        with self._cuda.use(stream.cuda_stream):
            for event in tasks_of((*task.after, *task.behind)):
                stream.follow(event)
            if self.recording:
                start = self._clock.stamp(stream.cuda_stream)
            try:
                work()
            finally:  # what was issued before an error is under way, and its memory in use
                if start is not None:
                    self._on_gpu.append((task.op, task.lane, task.label, start, self._clock.stamp(stream.cuda_stream)))
                task.keeps = work
                stream.complete(task)
                self._in_flight[task.lane].append(task)

    def reap(self) -> None:
        """Let go of the memory of copies that are over."""
        for tasks in self._in_flight.values():
            while tasks and tasks[0].over():
                tasks.popleft().keeps = None

    def let_go(self, task: CudaTask) -> None:
        """Let go of the memory of ``task`` and all before it on its stream, which the compute lane is ordered after.

        Whatever reuses that memory is launched to the compute lane later on.
        """
        tasks = self._in_flight.get(task.lane)
        while tasks and task.keeps is not None:
            tasks.popleft().keeps = None

    @override
    def record(self, enabled: bool) -> None:
        if enabled:
            self._clock.reset()  # in every iteration, so that times stay precise
        super().record(enabled)

    @override
    def begin(self, op: int, label: str) -> Any:
        return op, "compute", label, self._clock.stamp(self._cuda.current_stream())

    @override
    def end(self, token: Any) -> None:
        self._on_gpu.append((*token, self._clock.stamp(self._cuda.current_stream())))

    @override
    def take_spans(self) -> list[Span]:
        spans = super().take_spans()  # those on the GPU that are not over come next time
        for _ in range(len(self._on_gpu)):
            op, lane, label, start, end = self._on_gpu.popleft()
            if self._clock.past(end):
                spans.append((op, lane, label, self._clock.seconds(start), self._clock.seconds(end)))
                self._clock.spare.extend((start[0], end[0]))
            else:
                self._on_gpu.append((op, lane, label, start, end))
        return spans
