"""A CUDA GPU as a device: copy streams, events that may be waited for before they are recorded, registered host memory.

The host runs ahead of the GPU. A task on ``h2d`` or ``d2h`` has *finished*, as far as this process is concerned, when
its copies have been issued to the lane's stream; its ``completion`` is the CUDA event recorded behind them. Waiting on
the GPU for an event that was not recorded yet would silently do nothing, so whoever needs a task first waits, on the
host, for its issue. That happens only behind updates on the host: everything else is issued at once.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from typing_extensions import override

from lt_offload.errors import BEYOND_THE_PLAN, ConfigError, OverBudget, UnsupportedError
from lt_offload.execute.device.arena import Arena
from lt_offload.execute.device.base import Buffer, Cell, Device, Event, before_writing
from lt_offload.execute.device.cuda_runtime import CudaRuntime
from lt_offload.execute.device.cuda_tasks import Completions, CudaTask, CudaTaskRunner, StreamState, tasks_of
from lt_offload.execute.device.lanes import ON_HOST, Lanes, plain_torch
from lt_offload.machine import driver
from lt_offload.machine.host_memory import HostMemory
from lt_offload.machine.numa import memory_node_of
from lt_offload.machine.staging import STAGING_BYTES, Staging
from lt_offload.machine.zero_copy import refusal
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)

_FOLLOWED = 4
"""After each of the first so many iterations the context is looked at, later whenever their number has doubled."""


class Context:
    """Divides ``budget`` bytes between the CUDA context and torch's allocator.

    The context grows as long as new kernels are launched, since each is loaded then, and with host memory that is
    registered, for which the device needs page tables. The driver takes both from the memory that is free at that
    moment, so an allocator that has already been given the rest of the budget would make the process pass it. So the
    context is followed as it grows, and the allocator's cap is lowered. ``planned`` bytes are left to it from the
    beginning, for the context with all kernels, workspaces of libraries included; 0: not known. Raises ``ConfigError``
    if the context alone is larger, and ``OverBudget`` if the device has less than ``budget``.
    """

    def __init__(self, cuda: CudaRuntime, budget: int, *, planned: int = 0) -> None:
        self._cuda = cuda
        self.budget = budget
        self.nbytes, self._exact = cuda.context_bytes()
        """The largest context seen so far; and whether the figure is this process's alone."""
        if budget <= self.nbytes:
            raise ConfigError(
                f"memory={format_bytes(budget)} is not more than the CUDA context alone occupies "
                f"({format_bytes(self.nbytes)})"
            )
        if budget - self.nbytes > cuda.available():
            raise OverBudget(
                f"memory={format_bytes(budget)} is more than the {format_bytes(cuda.available() + self.nbytes)} that "
                f"are free on {cuda.device}"
            )
        self._opened = self.nbytes
        self._planned = self._iterations = 0
        self.expect(planned)

    def expect(self, planned: int) -> None:
        """Leave ``planned`` bytes to it from now on."""
        if planned:
            self._planned = planned - driver.workspace_bytes(self._cuda.device)  # which are the allocator's
        self._cap()

    def follow(self, locked_bytes: int) -> None:
        """Look at it again; ``locked_bytes`` of host memory are registered by now. Waits for nothing."""
        context, exact = self._cuda.context_bytes()
        if not (exact and self._exact):
            # It may be others' memory that has grown. Page tables are known without asking.
            context = self._opened + driver.page_table_bytes(locked_bytes)
        if context > self.nbytes:
            _log.info("the CUDA context has grown from %s to %s", format_bytes(self.nbytes), format_bytes(context))
            self.nbytes = context
            self._cap()

    def end_iteration(self, locked_bytes: int) -> None:
        """Look at it again in the first iterations, where most of it happens, and less and less often later on."""
        self._iterations += 1
        if self._iterations <= _FOLLOWED or self._iterations.bit_count() == 1:
            self.follow(locked_bytes)

    def _cap(self) -> None:
        """Let the allocator have what the budget leaves it, and take back what it has beyond that and does not use."""
        left = max(0, self.budget - max(self.nbytes, self._planned))
        self._cuda.cap(left)
        if self._cuda.reserved() > left:
            torch.cuda.empty_cache()


class CudaDevice(Device):
    """A GPU of which this process may occupy ``budget`` bytes.

    The ``budget`` includes the CUDA context, for which ``context`` bytes are left from the beginning, as
    :class:`Context` says. ``host_threads``: threads that an update on the ``host`` lane may use; None: as many as torch
    uses, less those of the calling thread and of autograd, which launch kernels meanwhile.
    """

    _runner: CudaTaskRunner
    _task = CudaTask

    def __init__(self, budget: int, index: int = 0, *, host_threads: int | None = None, context: int = 0) -> None:
        cuda = self._cuda = CudaRuntime(index)
        self.budget = budget
        self.torch_device = cuda.device
        # Set torch's allocator up, and load what would take device memory by itself later on.
        driver.use_expandable_segments(cuda.device)
        driver.warm_up(cuda.device)
        self._context = Context(cuda, budget, planned=context)
        self._new_stream = partial(StreamState, completions=Completions(cuda))
        self._copy_streams = {lane: self._new_stream(cuda.stream()) for lane in ("h2d", "d2h")}
        self._compute_streams: dict[int, StreamState] = {}
        """By the identity of CUDA's stream object, which the state keeps alive."""
        self._compute: StreamState | None = None
        """The one of these that the compute lane was on last."""
        self._runner = CudaTaskRunner(cuda, self._copy_streams)
        node = memory_node_of(cuda.device)
        cores = len(node.cores) or len(os.sched_getaffinity(0))
        threads = host_threads or max(1, min(torch.get_num_threads(), cores - 2))
        self._lanes = Lanes(self._runner, threads={"host": threads}, prepare=lambda lane: node.bind())
        self._host = HostMemory(cuda.register, cuda.unregister, node=node)
        self._staging_memory = self._host.locked(STAGING_BYTES)  # first: later there may be nothing left to lock
        self._staging: Staging | None = None
        self._refusal: str | None = None
        """Reason why computations cannot access host memory; empty: they can; None: not tried yet."""
        self._seen: set[object] = set()
        """Shapes of batches whose demand for memory is known."""
        self._arena = self._new_arena(0)
        self._closed = False
        self._stop = weakref.finalize(self, _release, self._lanes, self._copy_streams, self._host)

    @property
    @override
    def room(self) -> int:
        return self.budget - self._context.nbytes

    # -- arena -------------------------------------------------------------------------------------------------------

    @override
    def reserve(self, nbytes: int) -> None:
        self._context.follow(self._host.locked_bytes)  # page tables of what was registered since the beginning
        # What a former run has left (a notebook's cell that failed) may be in reference cycles: nobody uses it, but it
        # would be missing here, or in the middle of the first iteration.
        gc.collect()
        try:
            super().reserve(nbytes)
        except torch.OutOfMemoryError as error:
            raise OverBudget(f"an arena of {format_bytes(nbytes)} ({nbytes} bytes) does not fit: {error}") from error

    @override
    def _new_arena(self, nbytes: int) -> Arena:
        with plain_torch():
            slab = self._cuda.empty(nbytes)
        # Copy streams may write at once, while kernels may still use this memory (or fill it: torch does so under
        # deterministic algorithms).
        self._cuda.current_stream().synchronize()
        return Arena(slab)

    @override
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        # With the mark: without it, a copy would overwrite what kernels that were launched before still read.
        self._arena.free(buffer, [*after, *buffer.inherited, self.mark()])

    # -- lanes and events --------------------------------------------------------------------------------------------

    @override
    def _queue(self, task: CudaTask) -> None:
        self._runner.reap()
        if self._blocks(task.lane) or not self._lanes.run_here(task):
            self._lanes.submit(task)

    def _blocks(self, lane: str) -> bool:
        """Return whether a task of ``lane`` may block the thread that runs it: then it gets the lane's own thread."""
        if lane in ON_HOST:
            return True
        if not self._host.has_pageable:
            return False
        if self._staging is None:
            self._staging = Staging(
                self._staging_memory, event=partial(self._cuda.event, timing=False), use=self._cuda.use, copy=_copy
            )
        return True

    @override
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        # An event records the stream as it is now. What is launched later is not waited for, so that whoever takes a
        # mark too early reads what is about to be written.
        mark = CudaTask.past("compute", "compute")
        self._compute_stream().complete(mark)
        return mark

    def _compute_stream(self) -> StreamState:
        current = self._cuda.current_stream()
        stream = self._compute_streams.get(id(current))
        if stream is None:
            stream = self._compute_streams[id(current)] = self._new_stream(current)
        if stream is not self._compute:
            # The lane is one sequence, on whatever stream it goes on: optimizer.step() in a loop, or whoever looks at
            # weights, may be on another one than the forward.
            last, self._compute = self._compute, stream
            if last is not None:
                end = CudaTask.past("compute", "compute")
                last.complete(end)
                stream.follow(end)
        return stream

    @override
    def wait(self, *events: Event, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> None:
        awaited = tasks_of((*events, *before_writing(writes)) if writes else events)
        self._lanes.finish(awaited)
        if events or self._lanes.failed:
            self._lanes.check(events)
        # Both waits are needed. On the host until a task has been issued: a stream that waits for an event which has
        # not been recorded does not wait at all. On the stream for the work itself.
        compute = self._compute_stream()
        for task in awaited:
            compute.follow(task)
            self._runner.let_go(task)

    @override
    def stream(self) -> object:
        return self._cuda.current_stream()

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
        self._finish_copies()
        self._compute_stream().cuda_stream.synchronize()  # kernels may be reading host memory
        self._lanes.check()

    @override
    def _finish_copies(self) -> None:
        super()._finish_copies()
        for stream in self._copy_streams.values():
            stream.cuda_stream.synchronize()
        self._runner.reap()

    # -- memory outside the arena ------------------------------------------------------------------------------------

    @override
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._host.is_pageable(source):
            assert self._staging is not None, "pageable memory is copied on the lane's own thread"
            self._staging.to_device(target, source, self._cuda.current_stream())
        elif self._host.is_pageable(target):
            assert self._staging is not None, "pageable memory is copied on the lane's own thread"
            self._staging.to_host(target, source, self._cuda.current_stream())
        else:
            _copy(target, source)

    @override
    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if not self._host.has_pageable:
            super().copy_all(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    @override
    def zero_copy_view(self, host: torch.Tensor) -> torch.Tensor:
        if self._host.is_pageable(host):
            raise UnsupportedError(
                f"{self.torch_device} cannot compute in host memory that is not page-locked; see `ulimit -l`, or plan "
                "without direct access"
            )
        with plain_torch():
            if self._refusal is None:
                probe = self._host.empty((1024,), torch.int32)
                self._refusal = refusal(
                    self._cuda.zero_copy_view, probe, lambda: self._cuda.current_stream().synchronize()
                )
            if self._refusal:
                raise UnsupportedError(
                    f"{self.torch_device} cannot compute in host memory: {self._refusal}; a plan made on this machine "
                    "does not ask for it"
                )
            return self._cuda.zero_copy_view(host)

    @contextmanager
    @override
    def accounting(self, signature: object = None) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            used = f"the budget of {format_bytes(self.budget)} is used up"
            raise OverBudget(f"{used}; {BEYOND_THE_PLAN} ({error})") from error
        if signature not in self._seen and not self._closed:
            self._seen.add(signature)
            self._context.follow(self._host.locked_bytes)

    @override
    def expect(self, context: int) -> None:
        self._context.expect(context)

    @override
    def end_iteration(self) -> None:
        self._context.end_iteration(self._host.locked_bytes)

    # -- figures -----------------------------------------------------------------------------------------------------

    @override
    def memory(self) -> int:
        return self._cuda.reserved() + self._context.nbytes

    @override
    def peak_memory(self) -> int:
        return self._cuda.peak_reserved() + self._context.nbytes

    @override
    def reset_peak(self) -> None:
        self._cuda.reset_peak()

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._finish_copies()
        self._compute_stream().cuda_stream.synchronize()  # kernels may still read the arena and registered memory
        self._stop()  # a finalizer runs once
        del self._arena  # or the driver would not get the slab back
        self._arena = self._new_arena(0)
        self._cuda.cap(None)
        self._lanes.check()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _release(lanes: Lanes, streams: Mapping[str, StreamState], host: HostMemory) -> None:
    lanes.stop()
    for stream in streams.values():
        stream.cuda_stream.synchronize()
    host.close()
