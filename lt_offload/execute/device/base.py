"""The device interface: an arena, asynchronous lanes beside the compute lane, and events that link them.

The *compute lane* is whatever the calling thread runs (or launches). ``h2d`` and ``d2h`` copy; ``host`` runs updates.
``peers`` waits for updates that other processes run, where several have host memory in common, and ``parts`` for their
gradients; ``network`` adds up sums with those of other machines.
Tasks of one lane run in the order of submission, those of ``host`` and ``peers`` in the order of urgency. The
interface never blocks the calling thread except in :meth:`Device.synchronize`, in :meth:`Device.wait` where the event's
work has not been issued yet, and where an emulated device has no other way.

An :class:`Event` is done when its task has run. Work on the compute lane that reads what a task wrote must be preceded
by :meth:`Device.wait`; a task that reads what the compute lane wrote takes an event of :meth:`Device.mark` in
``after``. Every access is declared as ``reads``/``writes`` of :class:`Cell` objects, so that a happens-before checker
(``tests/support/hostile/races.py``) can verify exactly that.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from lt_offload.compat.torch import foreach_copy_
from lt_offload.errors import OverBudget
from lt_offload.execute.device.lanes import Lane, Lanes, Span, Task, TaskRunner, plain_torch
from lt_offload.machine.host_memory import HostMemory
from lt_offload.machine.pages import Pages
from lt_offload.model.state.generators import global_states, set_global_states
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from lt_offload.execute.device.arena import Arena


Event = Task
"""Completion of one task, or of what the compute lane had been given when it was marked."""


NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Cell:
    """Something whose accesses must be ordered: a device buffer or one tensor's host copy."""

    __slots__ = ("__weakref__", "label")

    def __init__(self, label: str = "") -> None:
        self.label = label


class Buffer(Cell):
    """A range of the arena in use. The arena is ``slab`` (uint8); whoever writes the range comes after ``releases``."""

    __slots__ = ("_bytes", "nbytes", "offset", "releases", "slab", "written")

    def __init__(self, label: str, offset: int, nbytes: int, slab: torch.Tensor, releases: Sequence[Event]) -> None:
        self.label = label
        self.offset = offset
        self.nbytes = nbytes
        self.slab = slab
        self.releases = releases
        self.written = False
        """Somebody writes it, after the releases."""
        self._bytes: torch.Tensor | None = None

    @property
    def inherited(self) -> Sequence[Event]:
        """Events of former users that the next one is ordered after, if nobody has written it since."""
        return () if self.written else self.releases

    @property
    def bytes(self) -> torch.Tensor:
        """The range as a uint8 tensor."""
        if self._bytes is None:
            # Views are kept, and used again in training: one that was made in inference mode could not be.
            with torch.inference_mode(False):
                self._bytes = self.slab[self.offset : self.offset + self.nbytes]
        return self._bytes

    def forget(self) -> None:
        """Let go of the memory: the range belongs to others now."""
        self.slab = self._bytes = NO_BYTES

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the beginning of the buffer as a contiguous tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.bytes[:nbytes].view(dtype).view(tuple(shape))


def before_writing(cells: Sequence[Cell]) -> list[Event]:
    """Return what comes before a write to ``cells``, which is about to be given to a lane."""
    events: list[Event] = []
    for cell in cells:
        if isinstance(cell, Buffer):
            cell.written = True
            events += cell.releases
    return events


class Device(ABC):
    """The device that blocks run on: ``EmulatedDevice`` and ``CudaDevice`` share all logic of the engine."""

    torch_device: torch.device
    budget: int
    """Bytes of device memory this process may occupy."""
    _arena: Arena
    _lanes: Lanes
    _runner: TaskRunner
    _host: HostMemory
    _task: type[Task] = Task

    @property
    def failed(self) -> bool:
        """True if some task has failed."""
        return self._lanes.failed

    @property
    def room(self) -> int:
        """Bytes of ``budget`` that tensors may occupy."""
        return self.budget

    # -- arena -------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Make the arena ``nbytes`` large; nothing may be allocated in it. Raises ``OverBudget``."""
        self._finish_copies()
        assert self._arena.used == 0, "the arena is in use"
        if nbytes > self.room:
            context = self.budget - self.room
            beside = f" and the CUDA context of {format_bytes(context)} exceed" if context else " exceeds"
            budget = f"{format_bytes(self.budget)} ({self.budget} bytes)"
            raise OverBudget(f"an arena of {format_bytes(nbytes)} ({nbytes} bytes){beside} the budget of {budget}")
        del self._arena  # the old slab must be gone before there is room for the new one
        try:
            self._arena = self._new_arena(nbytes)
        except (OverBudget, torch.OutOfMemoryError):
            self._arena = self._new_arena(0)
            raise

    @abstractmethod
    def _new_arena(self, nbytes: int) -> Arena:
        """Return an arena of so many bytes."""

    def place(self, offset: int, nbytes: int, label: str = "") -> Buffer:
        """Take the range of the arena at ``offset``; raises ``OverBudget`` if any of it is in use.

        Tasks and compute that write the buffer are ordered after the events with which the range was freed before:
        ``submit`` and ``wait`` of a write to the buffer take care of that.
        """
        return self._arena.place(offset, nbytes, label)

    def allocate(self, nbytes: int, label: str = "") -> Buffer:
        """Take the first range that fits, where no plan has fixed an offset; raises ``OverBudget``."""
        return self.place(self._arena.find(nbytes, label), nbytes, label)

    @abstractmethod
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        """Give the range back at once, although work that uses it may still be under way.

        Whoever writes it next is ordered after ``after`` and after everything the compute lane has been given so far.
        """

    # -- lanes and events --------------------------------------------------------------------------------------------

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
        """Queue ``task`` on ``lane``, to run after ``after`` and after the releases of the ranges that it writes.

        The ``host`` lane takes the task with the smallest ``urgency`` of those that may run.

        An exception in a task is raised by the next call of ``wait``, ``synchronize`` or ``drain``. ``op`` is the
        plan's op id for the trace, ``nbytes`` the copied bytes for throttled links. Tasks run without autograd and
        outside dispatch modes.
        """
        behind = before_writing(writes)
        queued = self._task(lane, task, after=after, behind=behind, label=label, op=op, nbytes=nbytes, urgency=urgency)
        self._queue(queued)
        return queued

    def _queue(self, task: Any) -> None:
        self._lanes.submit(task)

    @abstractmethod
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        """Return an event for all that the compute lane has been given so far, and declare what it accessed."""

    def wait(self, *events: Event, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> None:
        """Order what the compute lane is given from now on after ``events``, and declare what it will access."""
        # The calling thread is the compute lane: without this, it would read what a copy has filled in part.
        if awaited := (*events, *before_writing(writes)) if writes else events:
            self._lanes.finish(awaited)
        if events or self._lanes.failed:
            self._lanes.check(events)

    def stream(self) -> object:
        """Return what the calling thread launches computations to at the moment; None where there is one such thing."""
        return None

    def synchronize(self, *events: Event) -> None:
        """Block the calling thread until ``events`` are done."""
        self._lanes.finish(events)
        self._lanes.check(events)

    def drain(self) -> None:
        """Block until every lane is idle; raises the first error of a task."""
        self._finish_copies()
        self._lanes.check()

    def _finish_copies(self) -> None:
        self._lanes.finish(self._lanes.pending())

    # -- memory outside the arena ------------------------------------------------------------------------------------

    def limit_host(self, nbytes: int) -> None:
        """Hand out at most ``nbytes`` of host memory from now on, what is in use included; ``OverBudget`` beyond."""
        self._host.limit(nbytes)

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``'s contents in a host tensor fit for asynchronous copies, if possible the same."""
        with plain_torch():
            return self._host.adopt(tensor)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised host tensor fit for asynchronous copies; never called per step."""
        with plain_torch():
            return self._host.empty(shape, dtype)

    def host_group(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return uninitialised host tensors that lie side by side, so that one copy moves them all.

        ``parts`` are (shape, dtype) per tensor. Returns the bytes of all of them (uint8), and the tensors, each at a
        multiple of ``ALIGNMENT`` from the beginning, in order and without gaps but for that. Every tensor has a storage
        of its own: saving one writes one.
        """
        with plain_torch():
            return self._host.group(parts)

    def host_mapped(self, pages: Pages) -> None:
        """Make ``pages``, which others than this device have mapped, fit for asynchronous copies, if possible."""
        self._host.take_in(pages)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, as part of a task on a copy lane; every such task copies with this."""
        target.copy_(source, non_blocking=True)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy each of ``sources``, as part of a task on a copy lane: many small ones at the cost of a few."""
        foreach_copy_(targets, sources, non_blocking=True)

    @abstractmethod
    def zero_copy_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor for computations on the device whose storage is the host memory of ``host``.

        Whoever computes with it is ordered like a task that accesses the host copy: ``wait`` for the writer before, and
        let the next writer come after a ``mark``. ``wait`` may have to block, as kernels cannot be ordered after work
        on the host except by launching them later. ``host`` is contiguous, from ``host_adopt`` or ``host_empty``.
        Raises ``UnsupportedError`` if computations cannot access this memory; the message says why.
        """

    def cross(self, lane: Lane, nbytes: int) -> None:  # noqa: B027
        """The compute lane itself moves ``nbytes`` over the link of ``lane``: only throttled links need to be told."""

    def empty_all(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        """Return uninitialised device memory outside the arena, for activations that are fetched back.

        ``parts`` are (shape, dtype) per tensor. It may still be in use by earlier work of the compute lane: a task that
        writes it takes a later ``mark`` in ``after``.
        """
        with plain_torch():  # a tensor made in inference mode could never be part of a graph, however long it lives
            return [torch.empty(shape, dtype=dtype, device=self.torch_device) for shape, dtype in parts]

    @abstractmethod
    def accounting(self, signature: object = None) -> AbstractContextManager[None]:
        """Within the context every device allocation of the calling thread is held against the budget.

        On CUDA the allocator's own cap does that and this only turns its error into ``OverBudget``; ``signature``
        (shapes of the batch) tells it when to expect new kernels. The emulated device counts the storages that
        operations make.
        """

    def between(self) -> AbstractContextManager[None]:
        """Enclose everything from the first iteration to the last, ``accounting`` within: the budget holds there, too.

        Outside ``accounting`` the emulated device counts what operations make from device memory; what they make from
        host memory or from nothing is host memory.
        """
        return self.accounting()

    def expect(self, context: int) -> None:  # noqa: B027
        """Leave so many bytes to the context and to workspaces, as a plan does that was made after this was opened."""

    def enforce(self, enforced: bool) -> None:  # noqa: B027
        """Hold allocations against the budget, or count them only, as in a step whose demand nobody knows yet."""

    def stays(self, *tensors: torch.Tensor) -> None:  # noqa: B027
        """Hold device tensors that no operation under account has made against the budget, as long as they live."""

    # -- random numbers ----------------------------------------------------------------------------------------------

    def rng_state(self) -> list[torch.Tensor]:
        """Return the state of every generator a block may draw from (CPU, and the device's own)."""
        with plain_torch():
            return global_states([self.torch_device])

    def set_rng_state(self, state: list[torch.Tensor]) -> None:
        """Restore what ``rng_state`` returned."""
        with plain_torch():
            set_global_states(state, [self.torch_device])

    # -- figures -----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return a time in seconds on the clock of ``spans``."""
        return time.perf_counter()

    def record(self, enabled: bool) -> None:
        """Start or stop collecting spans of tasks."""
        self._runner.record(enabled)

    def begin_compute(self, op: int, label: str) -> object:
        """Mark the start of a computation for the trace; returns a token for ``end_compute``."""
        return self._runner.begin(op, label) if self._runner.recording else None

    def end_compute(self, token: object) -> None:
        """Mark its end."""
        if token is not None:
            self._runner.end(token)

    def take_spans(self) -> list[Span]:
        """Return and clear the spans of finished tasks and computations."""
        return self._runner.take_spans()

    def end_iteration(self) -> None:  # noqa: B027
        """Note that an iteration has been issued: the device's own need (CUDA's context) may have grown."""

    @abstractmethod
    def memory(self) -> int:
        """Return the device bytes in use now, arena extent included."""

    @abstractmethod
    def peak_memory(self) -> int:
        """Return the high-water mark of ``memory`` since ``reset_peak``."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Restart the high-water mark."""

    @property
    def host_bytes(self) -> int:
        """Bytes handed out by ``host_adopt`` and ``host_empty`` and still in use."""
        return self._host.nbytes

    @abstractmethod
    def close(self) -> None:
        """Stop lanes and release memory; the device cannot be used afterwards."""
