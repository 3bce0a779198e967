"""A CUDA GPU as a device: copy streams, events that may be waited for before they are recorded, registered host memory.

The host runs ahead of the GPU. A task on ``h2d`` or ``d2h`` has *finished*, as far as this process is concerned, when
its copies have been issued to the lane's stream; its ``completion`` is the CUDA event recorded behind them. Waiting on
the GPU for an event that was not recorded yet would silently do nothing, so whoever needs a task first waits, on the
host, for its issue. That happens only behind updates on the host: everything else is issued at once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from typing_extensions import override

from lt_offload.errors import ConfigError, OverBudget, UnsupportedError
from lt_offload.execute.arena import Arena, ArenaBuffer
from lt_offload.execute.cuda_runtime import CudaRuntime
from lt_offload.execute.cuda_tasks import CudaTask, Runner, tasks_of
from lt_offload.execute.device import Buffer, Cell, Device, Event, Lane
from lt_offload.execute.hostmem import HostMemory
from lt_offload.execute.lanes import ThreadLanes, plain_torch
from lt_offload.profile.mapped import refusal
from lt_offload.units import format_bytes


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
        self._runner = Runner(cuda, streams)
        self._lanes = ThreadLanes(self._runner, threads={"host": host_threads} if host_threads else {})
        self._host = HostMemory(cuda.register, cuda.unregister)
        self._refusal: str | None = None
        """Why computations cannot access host memory; empty: they can; None: not tried yet."""
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
        self._arena.free(buffer, [*tasks_of(after), self._mark()])

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
        urgency: int = 0,
    ) -> Event:
        self._runner.reap()
        options = {"label": label, "op": op, "nbytes": nbytes, "urgency": urgency}
        queued = CudaTask(lane, task, after=tasks_of(after), behind=_releases(writes), **options)
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
        tasks, releases = tasks_of(events), _releases(writes)
        self._lanes.finish([*tasks, *releases])
        self._lanes.check(tasks)
        compute = self._cuda.current_stream()
        for task in (*tasks, *releases):
            if task.completion is not None:
                compute.wait_event(task.completion)
                self._runner.let_go(task)

    @override
    def synchronize(self, *events: Event) -> None:
        tasks = tasks_of(events)
        self._lanes.finish(tasks)
        for task in tasks:
            if task.completion is not None:
                task.completion.synchronize()
        self._runner.reap()
        self._lanes.check(tasks)

    @override
    def drain(self) -> None:
        self._settle()
        self._cuda.current_stream().synchronize()  # kernels may be reading host memory
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
    def host_group(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with plain_torch():
            return self._host.group(parts)

    @override
    def direct_view(self, host: torch.Tensor) -> torch.Tensor:
        with plain_torch():
            if self._refusal is None:
                probe = self._host.empty((1024,), torch.int32)
                self._refusal = refusal(self._cuda.direct_view, probe, self._cuda.current_stream().synchronize)
            if self._refusal:
                raise UnsupportedError(
                    f"{self.torch_device} cannot compute in host memory: {self._refusal}; a plan made on this machine "
                    "does not ask for it"
                )
            return self._cuda.direct_view(host)

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


def _releases(writes: Sequence[Cell]) -> list[CudaTask]:
    return tasks_of([event for cell in writes if isinstance(cell, ArenaBuffer) for event in cell.releases])
