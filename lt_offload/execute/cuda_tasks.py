"""Tasks of a CUDA device: copies issued to streams, updates run on the host. Knows what memory to keep alive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from lt_offload.execute.cuda_runtime import CudaRuntime
from lt_offload.execute.device import Event
from lt_offload.execute.lanes import Task


class CudaTask(Task):
    """A task, or a mark of the compute lane (finished from the start), with its GPU side."""

    __slots__ = ("completion", "keeps", "start")

    def __init__(self, lane: str, work: Callable[[], None], **options: Any) -> None:
        super().__init__(lane, work, **options)
        self.completion: Any = None
        """CUDA event behind the work; None as long as it is not issued, and for work on the host."""
        self.start: Any = None
        self.keeps: Callable[[], None] | None = None
        """The work, and with it the memory it uses, until the GPU is through or the compute lane ordered after it."""

    @override
    def arrived(self) -> bool:
        events = tasks_of((*self.after, *self.behind))
        return all(event.completion is None or event.completion.query() for event in events)

    @override
    def done(self) -> bool:
        return self.finished and (self.completion is None or bool(self.completion.query()))


def tasks_of(events: Sequence[Event]) -> list[CudaTask]:
    """Return ``events`` as what they are on this device."""
    tasks = [event for event in events if isinstance(event, CudaTask)]
    assert len(tasks) == len(events), "an event of another device"
    return tasks


class Runner:
    """Issues copies to their streams and runs updates on the host."""

    def __init__(self, cuda: CudaRuntime, streams: dict[str, Any]) -> None:
        self._cuda = cuda
        self._streams = streams
        self._in_flight: dict[str, deque[CudaTask]] = {lane: deque() for lane in streams}
        self.recording = False
        self.on_gpu: deque[tuple[int, str, str, Any, Any]] = deque()
        self._on_host: deque[tuple[int, str, str, float, float]] = deque()
        self._origin: tuple[float, Any] = (0.0, None)

    def __call__(self, task: Task) -> None:
        """Run ``task``, or issue it."""
        assert isinstance(task, CudaTask) and task.work is not None
        if task.lane == "host":
            self._run_on_host(task, task.work)
        else:
            self._issue(task, task.work)

    def _run_on_host(self, task: CudaTask, work: Callable[[], None]) -> None:
        for event in tasks_of((*task.after, *task.behind)):
            if event.completion is not None:
                event.completion.synchronize()
        start = time.perf_counter()
        work()
        if self.recording:
            self._on_host.append((task.op, task.lane, task.label, start, time.perf_counter()))

    def _issue(self, task: CudaTask, work: Callable[[], None]) -> None:
        stream, recording = self._streams[task.lane], self.recording
        completion = self._cuda.event(timing=recording)
        with self._cuda.use(stream):
            for event in tasks_of((*task.after, *task.behind)):
                if event.completion is not None and event.lane != task.lane:
                    stream.wait_event(event.completion)
            if recording:
                task.start = self._cuda.event(timing=True)
                task.start.record(stream)
            try:
                work()
            finally:  # what was issued before an error is under way
                completion.record(stream)
                task.keeps = work
                task.completion = completion
                self._in_flight[task.lane].append(task)
        if recording:
            self.on_gpu.append((task.op, task.lane, task.label, task.start, completion))

    def reap(self) -> None:
        """Let go of the memory of copies that are over."""
        for tasks in self._in_flight.values():
            while tasks and tasks[0].completion.query():
                tasks.popleft().keeps = None

    def let_go(self, task: CudaTask) -> None:
        """The compute lane is ordered after ``task`` and all before it on its stream, so it may reuse their memory."""
        tasks = self._in_flight.get(task.lane)
        while tasks and task.keeps is not None:
            tasks.popleft().keeps = None

    def record(self, enabled: bool) -> None:
        """Start or stop collecting spans."""
        if enabled and not self.recording:
            origin = self._cuda.event(timing=True)
            origin.record(self._cuda.current_stream())
            origin.synchronize()
            self._origin = (time.perf_counter(), origin)
        self.recording = enabled

    def take_spans(self) -> list[tuple[int, str, str, float, float]]:
        """Return what is over, in seconds on the host's clock; the rest comes next time."""
        spans = [self._on_host.popleft() for _ in range(len(self._on_host))]
        zero, origin = self._origin
        for _ in range(len(self.on_gpu)):
            op, lane, label, start, end = self.on_gpu.popleft()
            if end.query():
                times = (zero + origin.elapsed_time(event) / 1e3 for event in (start, end))
                spans.append((op, lane, label, *times))
            else:
                self.on_gpu.append((op, lane, label, start, end))
        return spans
