"""A device in RAM: a budgeted arena, asynchronous lanes and an account of every allocation; the CPU is its processor.

It makes the numbers of a CPU run, fails where a device of that size would fail, and can be made hostile: lanes that run
tasks as late as possible or in random order, freed memory that is overwritten, and a happens-before checker. It says
nothing about speed, except that links can be throttled.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from typing_extensions import override

from lt_offload.compat.torch import address_of
from lt_offload.errors import BEYOND_THE_PLAN, OverBudget, UnsupportedError
from lt_offload.execute.device.arena import Arena, ArenaBuffer, Freed
from lt_offload.execute.device.base import Buffer, Cell, Device, Event, Lane
from lt_offload.execute.device.lanes import UNORDERED, CallerLanes, Lanes, Task, plain_torch
from lt_offload.execute.device.races import ORIGIN, Checker
from lt_offload.execute.device.threads import ThreadLanes
from lt_offload.machine.accounting import Account
from lt_offload.machine.heap import keep_freed_memory
from lt_offload.machine.host_memory import HOST_MEMORY, HostMemory
from lt_offload.units import format_bytes


class DeviceAccount(Account):  # type: ignore[no-untyped-call]
    """The device's memory, storage by storage, held against its budget.

    Device and host are both RAM here, so that a tensor does not say whose memory it is in. In an iteration whatever an
    operation makes is device memory. Between iterations a tensor is where what it is made from is, as on a GPU:
    operations on device tensors make device tensors. Weights are on the host between iterations, and so are clones of
    them, what is made from nothing, and what comes from files. What has once been counted counts until it is freed.

    Before it refuses, it waits for the copies to the host that are on their way: they hold device memory.
    """

    def __init__(self, limit: int, lanes: Lanes) -> None:
        super().__init__(limit=limit, hint=BEYOND_THE_PLAN)
        self._lanes = lanes
        self.everything = True
        """Whether all that operations make is device memory, or only what they make from device memory."""

    def _meet(self, storage: torch.UntypedStorage, func: Any, given: list[torch.Tensor]) -> None:
        if self.everything or any(self._holds(tensor) for tensor in given):
            super()._meet(storage, func, given)

    def _holds(self, tensor: torch.Tensor) -> bool:
        charge = self._live.get(address_of(tensor.untyped_storage()))
        return charge is not None and charge.nbytes > 0

    def _charge(self, storage: torch.UntypedStorage, *, free: bool, cause: object) -> None:
        try:
            super()._charge(storage, free=free, cause=cause)
            return
        except OverBudget:
            leaving = self._lanes.pending("d2h")
            if not leaving:
                raise
        self._lanes.finish(leaving)
        super()._charge(storage, free=free, cause=cause)


class _Link:
    """The bytes per second of one direction, and how much of its time computations have taken."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_until = 0.0
        """When the last access of a computation ends."""
        self.taken = 0.0
        """Seconds of all accesses of computations."""


class LinkRunner:
    """Does the work of a task, no faster than its lane's link.

    There is one link per direction; both work at the same time. What a computation itself reads or writes in host
    memory goes first, at the full speed of the link; copies pause meanwhile. Nothing is computed meanwhile either: real
    hardware would hide part of the access behind arithmetic.

    Args:
        rates: bytes per second by lane; lanes without one are not slowed down.
    """

    def __init__(self, rates: Mapping[str, float | None]) -> None:
        self._links = {lane: _Link(rate) for lane, rate in rates.items() if rate is not None}
        self.recording = False
        self.spans: deque[tuple[int, str, str, float, float]] = deque()

    def __call__(self, task: Task) -> None:
        """Run ``task``."""
        assert task.work is not None
        start = time.perf_counter()
        link = self._links.get(task.lane)
        if link is None:
            task.work()
        else:
            taken = link.taken - max(0.0, link.busy_until - start)
            task.work()
            end = start + task.nbytes / link.bytes_per_s - taken
            while (left := end + link.taken - time.perf_counter()) > 0:
                time.sleep(left)
        if self.recording and task.lane != UNORDERED:
            self.spans.append((task.op, task.lane, task.label, start, time.perf_counter()))

    def cross(self, lane: str, nbytes: int) -> None:
        """Block the calling thread, which computes, until it has moved ``nbytes`` over the link of ``lane``."""
        link = self._links.get(lane)
        if link is not None:
            seconds = nbytes / link.bytes_per_s
            link.busy_until = time.perf_counter() + seconds
            link.taken += seconds
            time.sleep(seconds)


Mode = Literal["lazy", "random", "thread"]
Accounting = Literal["always", "off"]

POISON = 0xFF
"""Not a number in every floating-point format, -1 in every integer one."""


class EmulatedDevice(Device):
    """A device of ``budget`` bytes, in RAM.

    Args:
        budget: bytes of device memory, a hard limit.
        mode: when tasks run. ``thread``: at once, each lane on a thread of its own. ``lazy``: on the calling thread, as
            late as possible. ``random``: on the calling thread, at random occasions.
        seed: for ``random``.
        check: verify by a happens-before checker that all accesses are ordered; defects raise ``Race``.
        h2d_bytes_per_s: speed of copies to the device, in ``thread`` mode; None: as fast as the RAM.
        d2h_bytes_per_s: the same for copies from the device. Both directions work at the same time.
        host_threads: threads that an update on the ``host`` lane may use; None: as many as the calling thread.
        accounting: hold allocations outside the arena against the budget ``always`` or never (``off``; figures are the
            arena's then).
        poison: overwrite freed and fresh memory, so that it cannot be used unnoticed. None: except in ``thread`` mode.
        ignore: for tests of the engine. Called with the label of a task (or ``"compute"``, or ``"free LABEL"``) and the
            label of an event it is to be ordered after (a task's, ``"compute"``, or ``"release LABEL"`` for the release
            of a memory range); returning True drops that dependency.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self,
        budget: int,
        mode: Mode = "thread",
        *,
        seed: int = 0,
        check: bool = False,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        host_threads: int | None = None,
        accounting: Accounting = "always",
        poison: bool | None = None,
        ignore: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.budget = budget
        self._runner = LinkRunner({"h2d": h2d_bytes_per_s, "d2h": d2h_bytes_per_s} if mode == "thread" else {})
        self._lanes: Lanes
        if mode == "thread":
            self._lanes = ThreadLanes(self._runner, threads={"host": host_threads} if host_threads else {})
        else:
            self._lanes = CallerLanes(self._runner, seed=seed if mode == "random" else None)
        self.has_threads = mode == "thread"
        self._checker = Checker() if check else None
        self._accounting = accounting
        self._poison = mode != "thread" if poison is None else poison
        self._ignore = ignore
        self._past = Task.past("compute", "compute")
        self._compute_label = "compute"
        self._entered = False
        self._host = Account(what=HOST_MEMORY)
        self._slabs = HostMemory(_no_registration, _no_registration)
        self._closed = False
        # Neither lanes nor account refer to the device: it is collected, and its threads end, even if nobody closes it.
        self._account = DeviceAccount(budget, self._lanes)
        self._stop = weakref.finalize(self, _release, self._lanes, keep_freed_memory())
        self._arena = self._new_arena(0)

    # -- arena -------------------------------------------------------------------------------------------------------

    @override
    def reserve(self, nbytes: int) -> None:
        self._lanes.finish(self._lanes.pending())
        assert self._arena.used == 0, "the arena is in use"
        if nbytes > self.budget:
            raise OverBudget(
                f"an arena of {format_bytes(nbytes)} ({nbytes} bytes) exceeds the budget of "
                f"{format_bytes(self.budget)} ({self.budget} bytes)"
            )
        del self._arena  # the old slab must be gone before the new one is charged
        try:
            self._arena = self._new_arena(nbytes)
        except OverBudget:
            self._arena = self._new_arena(0)
            raise

    def _new_arena(self, nbytes: int) -> Arena:
        with plain_torch():
            slab = torch.empty(nbytes, dtype=torch.uint8)
            if self._poison:
                _fill(slab)
        self._account.charge(slab)
        checker = self._checker

        def forgettable(freed: Freed) -> bool:
            done = all(event.done() for event in freed.releases)
            return done and (checker is None or checker.known((e.clock for e in freed.releases), freed.accesses))

        return Arena(slab, forgettable)

    @override
    def place(self, offset: int, nbytes: int, label: str = "") -> Buffer:
        buffer, accesses = self._arena.place(offset, nbytes, label)
        if self._checker is not None:
            self._checker.place(buffer, accesses)
        return buffer

    @override
    def allocate(self, nbytes: int, label: str = "") -> Buffer:
        return self.place(self._arena.find(nbytes, label), nbytes, label)

    @override
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        # Ranges change hands in the order of issue. Whoever takes this one next is ordered after its last users and
        # after the poison, so that memory is reused without waiting for either.
        releases = self._kept("free ", after, buffer)
        releases += buffer.inherited if isinstance(buffer, ArenaBuffer) else ()
        pending = [task for task in releases if not task.finished]
        if self._poison and buffer.nbytes:
            view = buffer.bytes
            if pending:
                poison = Task(UNORDERED, lambda: _fill(view), behind=pending, label=f"poison {buffer.label}")
                poison.clock = ORIGIN  # nothing to be ordered after but the releases, which are listed themselves
                self._lanes.submit(poison)
                pending.append(poison)
                releases.append(poison)
            else:
                with plain_torch():
                    _fill(view)
        if self._checker is None:
            self._arena.free(buffer, pending)
        else:
            self._arena.free(buffer, [*releases, self._mark()], self._checker.free(buffer))

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
        behind = self._releases(label, writes)
        options: dict[str, Any] = {"label": label, "op": op, "nbytes": nbytes, "urgency": urgency}
        queued = Task(lane, task, after=self._kept(label, after), behind=behind, **options)
        if self._checker is not None:
            clocks = [t.clock for t in (*queued.after, *behind)]
            queued.clock = self._checker.task(lane, label, clocks, reads, writes, strand=op)
            queued.work = _checked(task, writes)
        self._lanes.submit(queued)
        return queued

    @override
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        self._lanes.advance()
        return self._mark(reads, writes)

    def _mark(self, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Task:
        if self._checker is None:
            return self._past
        mark = Task.past("compute", "compute")
        mark.clock = self._checker.mark(self._compute_label, reads, writes)
        return mark

    @override
    def wait(self, *events: Event, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> None:
        tasks = self._kept("compute", events)
        releases = self._releases("compute", writes)
        self._lanes.advance()
        self._lanes.finish([*tasks, *releases])
        self._lanes.check(tasks)
        if self._checker is not None:
            self._checker.wait(self._compute_label, [t.clock for t in (*tasks, *releases)], reads, writes)

    @property
    @override
    def failed(self) -> bool:
        return self._lanes.failed

    @override
    def synchronize(self, *events: Event) -> None:
        tasks = self._kept("compute", events)
        self._lanes.finish(tasks)
        self._lanes.check(tasks)
        if self._checker is not None:
            self._checker.synchronize(t.clock for t in tasks)

    @override
    def drain(self) -> None:
        self._lanes.finish(self._lanes.pending())
        if self._checker is not None:
            self._checker.drain()
        self._lanes.check()

    def _kept(self, label: str, events: Sequence[Event], buffer: Buffer | None = None) -> list[Task]:
        """Return ``events`` as tasks, without those that are to be ignored by ``label`` (and that of ``buffer``)."""
        tasks: list[Task] = [event for event in events if isinstance(event, Task)]
        assert len(tasks) == len(events), "an event of another device"
        if self._ignore is None:
            return tasks
        label += buffer.label if buffer is not None else ""
        return [t for t in tasks if not self._ignore(label, t.label)]

    def _releases(self, label: str, writes: Sequence[Cell]) -> list[Task]:
        tasks: list[Task] = []
        for cell in writes:
            releases = cell.releases if isinstance(cell, ArenaBuffer) else ()
            if isinstance(cell, ArenaBuffer):
                cell.written = True
            if releases and not (self._ignore and self._ignore(label, f"release {cell.label}")):
                tasks += releases
        return tasks

    # -- memory outside the arena ------------------------------------------------------------------------------------

    @override
    def limit_host(self, nbytes: int) -> None:
        self._host.limit = nbytes

    @override
    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        self._host.charge(tensor)
        return tensor

    @override
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with plain_torch():
            tensor = torch.empty(tuple(shape), dtype=dtype)
            if self._poison:
                _fill(_bytes(tensor))
        self._host.charge(tensor)
        return tensor

    @override
    def host_group(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with plain_torch():
            span, tensors = self._slabs.group(parts)
            if self._poison:
                _fill(span)
        for tensor in tensors:
            self._host.charge(tensor)
        return span, tensors

    @override
    def zero_copy_view(self, host: torch.Tensor) -> torch.Tensor:
        if not host.is_contiguous():
            raise UnsupportedError("a tensor that is not contiguous cannot be read in host memory; call .contiguous()")
        with torch.inference_mode(False):
            return host.detach()

    @override
    def cross(self, lane: Lane, nbytes: int) -> None:
        """Copies pause meanwhile, and nothing is computed; see :class:`LinkRunner`."""
        self._runner.cross(lane, nbytes)

    @override
    def empty(self, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            # A tensor made in inference mode could never be part of a graph, however long it lives.
            with torch.inference_mode(False):
                return self.empty(shape, stride, dtype)
        if stride is None:
            tensor = torch.empty(tuple(shape), dtype=dtype)
        else:
            tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
        if self._entered:
            self._account.charge(tensor)
        if self._poison:
            with plain_torch():
                _fill(_bytes(tensor))
        return tensor

    @override
    def empty_all(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        # Charged all at once: the account as a mode would take longer for each than all of them take.
        with plain_torch():
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in parts]
            if self._poison:
                for tensor in tensors:
                    _fill(_bytes(tensor))
        if self._entered:
            self._account.charge(*tensors)
        return tensors

    @contextmanager
    @override
    def accounting(self, signature: object = None) -> Iterator[None]:
        with self._counting(everything=True):
            yield

    @contextmanager
    @override
    def between(self) -> Iterator[None]:
        with self._counting(everything=False):
            yield

    @contextmanager
    def _counting(self, *, everything: bool) -> Iterator[None]:
        account = self._account
        before, account.everything = account.everything, everything
        outermost = self._accounting == "always" and not self._entered
        self._entered = self._entered or outermost
        try:
            with account if outermost else nullcontext():
                yield
        finally:
            account.everything = before
            self._entered = self._entered and not outermost

    @override
    def enforce(self, enforced: bool) -> None:
        self._account.limit = self.budget if enforced else None

    @override
    def stays(self, *tensors: torch.Tensor) -> None:
        self._account.charge(*tensors)

    # -- random numbers ----------------------------------------------------------------------------------------------

    @override
    def rng_state(self) -> list[torch.Tensor]:
        with plain_torch():
            return [torch.get_rng_state()]

    @override
    def set_rng_state(self, state: list[torch.Tensor]) -> None:
        (cpu,) = state
        with plain_torch():
            torch.set_rng_state(cpu)

    # -- figures -----------------------------------------------------------------------------------------------------

    @override
    def now(self) -> float:
        return time.perf_counter()

    @override
    def record(self, enabled: bool) -> None:
        self._runner.recording = enabled

    @override
    def begin_compute(self, op: int, label: str) -> object:
        self._compute_label = label
        return (op, label, time.perf_counter()) if self._runner.recording else None

    @override
    def end_compute(self, token: object) -> None:
        self._compute_label = "compute"
        if token is not None:
            op, label, start = cast(tuple[int, str, float], token)
            self._runner.spans.append((op, "compute", label, start, time.perf_counter()))

    @override
    def take_spans(self) -> list[tuple[int, str, str, float, float]]:
        finished = self._runner.spans
        return [finished.popleft() for _ in range(len(finished))]

    @override
    def memory(self) -> int:
        return self._account.current

    @override
    def peak_memory(self) -> int:
        return self._account.peak

    @override
    def reset_peak(self) -> None:
        self._account.reset_peak()

    @property
    @override
    def host_bytes(self) -> int:
        return self._host.current

    @override
    def close(self) -> None:
        self._stop()  # a finalizer runs once
        if not self._closed:
            self._closed = True
            self._arena = self._new_arena(0)
            self._lanes.check()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _release(lanes: Lanes, forget: Callable[[], None]) -> None:
    lanes.stop()
    forget()


def _no_registration(address: int, nbytes: int = 0) -> int:
    return 0


def _checked(task: Callable[[], None], writes: Sequence[Cell]) -> Callable[[], None]:
    def run() -> None:
        task()
        for cell in writes:
            cell.check_written()

    return run


def _fill(view: torch.Tensor) -> None:
    view.fill_(POISON)
