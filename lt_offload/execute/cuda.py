"""A CUDA GPU as a device: copy streams, events that may be waited for before they are recorded, registered host memory.

The host runs ahead of the GPU. A task on ``h2d`` or ``d2h`` has *finished*, as far as this process is concerned, when
its copies have been issued to the lane's stream; its ``completion`` is the CUDA event recorded behind them. Waiting on
the GPU for an event that was not recorded yet would silently do nothing, so whoever needs a task first waits, on the
host, for its issue. That happens only behind updates on the host: everything else is issued at once.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from typing_extensions import override

from lt_offload.errors import ConfigError, OverBudget
from lt_offload.execute.arena import Arena, ArenaBuffer
from lt_offload.execute.cuda_runtime import CudaRuntime
from lt_offload.execute.device import Buffer, Cell, Device, Event, Lane
from lt_offload.execute.hostmem import HostMemory
from lt_offload.execute.lanes import Task, ThreadLanes, plain_torch
from lt_offload.units import format_bytes


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
    def done(self) -> bool:
        return self.finished and (self.completion is None or bool(self.completion.query()))


class CudaDevice(Device):
    """A GPU of which this process may occupy ``budget`` bytes.

    Args:
        budget: bytes of device memory, CUDA context included.
        index: which GPU.
        host_threads: threads that an update on the ``host`` lane may use; None: as many as the calling thread.
        runtime: stands in for CUDA in tests.
    """

    def __init__(
        self, budget: int, index: int = 0, *, host_threads: int | None = None, runtime: CudaRuntime | None = None
    ) -> None:
        cuda = self._cuda = CudaRuntime(index) if runtime is None else runtime
        self.budget = budget
        self.torch_device = cuda.device
        self._context = cuda.context_bytes()
        if budget <= self._context:
            raise ConfigError(
                f"memory={format_bytes(budget)} is not more than the CUDA context alone occupies "
                f"({format_bytes(self._context)})"
            )
        if budget - self._context > cuda.available():
            raise OverBudget(
                f"memory={format_bytes(budget)} is more than the {format_bytes(cuda.available() + self._context)} that "
                f"are free on {self.torch_device}"
            )
        cuda.cap(budget - self._context)
        streams = {lane: cuda.stream() for lane in ("h2d", "d2h")}
        self._streams = streams
        self._runner = _Runner(cuda, streams)
        self._lanes = ThreadLanes(self._runner, threads={"host": host_threads} if host_threads else {})
        self._host = HostMemory(cuda.register, cuda.unregister)
        self._arena = self._new_arena(0)
        self._closed = False
        self._stop = weakref.finalize(self, _release, self._lanes, streams, self._host)

    # -- arena -------------------------------------------------------------------------------------------------------

    @override
    def reserve(self, nbytes: int) -> None:
        self._settle()
        assert self._arena.used == 0, "the arena is in use"
        del self._arena  # the old slab must be gone before there is room for the new one
        try:
            if nbytes + self._context > self.budget:
                raise OverBudget(
                    f"an arena of {format_bytes(nbytes)} ({nbytes} bytes) and the CUDA context of "
                    f"{format_bytes(self._context)} exceed the budget of {format_bytes(self.budget)} "
                    f"({self.budget} bytes)"
                )
            self._arena = self._new_arena(nbytes)
        except (OverBudget, torch.OutOfMemoryError) as error:
            self._arena = self._new_arena(0)
            if isinstance(error, OverBudget):
                raise
            raise OverBudget(f"an arena of {format_bytes(nbytes)} ({nbytes} bytes) does not fit: {error}") from error

    def _new_arena(self, nbytes: int) -> Arena:
        with plain_torch():
            slab = self._cuda.empty(nbytes)
        return Arena(slab, lambda freed: all(event.done() for event in freed.releases))

    @override
    def place(self, offset: int, nbytes: int, label: str = "") -> Buffer:
        with torch.inference_mode(False):
            return self._arena.place(offset, nbytes, label)[0]

    @override
    def allocate(self, nbytes: int, label: str = "") -> Buffer:
        return self.place(self._arena.find(nbytes, label), nbytes, label)

    @override
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        self._arena.free(buffer, [*_tasks(after), self._mark()])

    # -- lanes and events --------------------------------------------------------------------------------------------

    @override
    def submit(
        self,
        lane: Lane,
        task: Callable[[], None],
        *,
        after: Sequence[Event] = (),
        reads: Sequence[Cell] = (),
        writes: Sequence[Cell] = (),
        label: str = "",
        op: int = -1,
        nbytes: int = 0,
    ) -> Event:
        self._runner.reap()
        queued = CudaTask(lane, task, after=_tasks(after), behind=_releases(writes), label=label, op=op, nbytes=nbytes)
        if lane == "host" or not self._lanes.run_here(queued):
            self._lanes.submit(queued)
        return queued

    @override
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        self._runner.reap()
        return self._mark()

    def _mark(self) -> CudaTask:
        mark = CudaTask("compute", _nothing, label="compute")
        mark.completion = self._cuda.event(timing=False)
        mark.completion.record(self._cuda.current_stream())
        mark.finish(None)
        return mark

    @override
    def wait(self, *events: Event, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> None:
        tasks, releases = _tasks(events), _releases(writes)
        self._lanes.finish([*tasks, *releases])
        self._lanes.check(tasks)
        compute = self._cuda.current_stream()
        for task in (*tasks, *releases):
            if task.completion is not None:
                compute.wait_event(task.completion)
                self._runner.let_go(task)

    @override
    def synchronize(self, *events: Event) -> None:
        tasks = _tasks(events)
        self._lanes.finish(tasks)
        for task in tasks:
            if task.completion is not None:
                task.completion.synchronize()
        self._runner.reap()
        self._lanes.check(tasks)

    @override
    def drain(self) -> None:
        self._settle()
        self._lanes.check()

    def _settle(self) -> None:
        self._lanes.finish(self._lanes.pending())
        for stream in self._streams.values():
            stream.synchronize()
        self._runner.reap()

    # -- memory outside the arena ------------------------------------------------------------------------------------

    @override
    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        with plain_torch():
            return self._host.adopt(tensor)

    @override
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with plain_torch():
            return self._host.empty(shape, dtype)

    @override
    def empty(self, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            if stride is None:
                return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=self.torch_device)

    @contextmanager
    @override
    def accounting(self, signature: object = None) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OverBudget(f"the budget of {format_bytes(self.budget)} is used up: {error}") from error

    # -- random numbers ----------------------------------------------------------------------------------------------

    @override
    def rng_state(self) -> list[torch.Tensor]:
        with plain_torch():
            return [torch.get_rng_state(), self._cuda.rng_state()]

    @override
    def set_rng_state(self, state: list[torch.Tensor]) -> None:
        cpu, gpu = state
        with plain_torch():
            torch.set_rng_state(cpu)
            self._cuda.set_rng_state(gpu)

    # -- figures -----------------------------------------------------------------------------------------------------

    @override
    def now(self) -> float:
        return time.perf_counter()

    @override
    def record(self, enabled: bool) -> None:
        self._runner.record(enabled)

    @override
    def begin_compute(self, op: int, label: str) -> object:
        if not self._runner.recording:
            return None
        start = self._cuda.event(timing=True)
        start.record(self._cuda.current_stream())
        return op, label, start

    @override
    def end_compute(self, token: object) -> None:
        if token is not None:
            op, label, start = cast(tuple[int, str, Any], token)
            end = self._cuda.event(timing=True)
            end.record(self._cuda.current_stream())
            self._runner.on_gpu.append((op, "compute", label, start, end))

    @override
    def take_spans(self) -> list[tuple[int, str, str, float, float]]:
        return self._runner.take_spans()

    @override
    def memory(self) -> int:
        return self._cuda.reserved() + self._context

    @override
    def peak_memory(self) -> int:
        return self._cuda.peak_reserved() + self._context

    @override
    def reset_peak(self) -> None:
        self._cuda.reset_peak()

    @property
    @override
    def host_bytes(self) -> int:
        return self._host.nbytes

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._settle()
        self._cuda.current_stream().synchronize()  # kernels may still read the arena and registered memory
        self._stop()  # a finalizer runs once
        self._arena = self._new_arena(0)
        self._cuda.cap(None)
        self._lanes.check()


def _nothing() -> None:
    pass


def _release(lanes: ThreadLanes, streams: dict[str, Any], host: HostMemory) -> None:
    lanes.stop()
    for stream in streams.values():
        stream.synchronize()
    host.close()


def _tasks(events: Sequence[Event]) -> list[CudaTask]:
    tasks = [event for event in events if isinstance(event, CudaTask)]
    assert len(tasks) == len(events), "an event of another device"
    return tasks


def _releases(writes: Sequence[Cell]) -> list[CudaTask]:
    return _tasks([event for cell in writes if isinstance(cell, ArenaBuffer) for event in cell.releases])


class _Runner:
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
        assert isinstance(task, CudaTask) and task.work is not None
        if task.lane == "host":
            self._run_on_host(task, task.work)
        else:
            self._issue(task, task.work)

    def _run_on_host(self, task: CudaTask, work: Callable[[], None]) -> None:
        for event in _tasks((*task.after, *task.behind)):
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
            for event in _tasks((*task.after, *task.behind)):
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
