"""The emulated device with instruments attached: tests see what the engine does wrong on it.

Lanes that run tasks as late as possible or in random order, links of a given speed, memory that is overwritten when it
is freed, a checker of accesses that nothing orders, and a seam that drops dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from typing_extensions import override

from lt_offload.execute.device.arena import Arena
from lt_offload.execute.device.base import Buffer, Cell, Event
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.execute.device.lanes import Lane, Lanes, Task, plain_torch
from lt_offload.execute.memory.live_group import HostCopy
from tests.support.hostile.lanes import UNORDERED, CallerLanes
from tests.support.hostile.links import LinkRunner
from tests.support.hostile.races import Checker, Clock

Mode = Literal["lazy", "random", "thread"]

POISON = 0xFF
"""Not a number in every floating-point format, -1 in every integer one."""


class HostileDevice(EmulatedDevice):
    """An emulated device of ``budget`` bytes.

    Args:
        budget: bytes of device memory, a hard limit.
        mode: when tasks run. ``thread``: at once, each lane on a thread of its own. ``lazy``: on the calling thread, as
            late as possible. ``random``: on the calling thread, at random occasions.
        seed: for ``random``.
        check: verify by a happens-before checker that all accesses are ordered (``Race``), and that snapshots are told
            before what they hold is written.
        counting: hold allocations outside the arena against the budget; else figures are the arena's.
        poison: overwrite freed and fresh memory, so that it cannot be used unnoticed. None: except in ``thread`` mode.
        ignore: called with the label of a task (or ``"compute"``, or ``"free LABEL"``) and the label of an event it is
            to be ordered after (a task's, ``"compute"``, or ``"release LABEL"`` for the release of a memory range);
            returning True drops that dependency.
        at_once: lanes whose tasks run when they are submitted, whatever the mode: other processes wait for them, while
            this one may wait for those.
        h2d_bytes_per_s: speed of copies to the device, in ``thread`` mode; None: as fast as the RAM.
        d2h_bytes_per_s: the same for copies from the device. Both directions work at the same time.
        host_threads: see :class:`EmulatedDevice`.
    """

    def __init__(
        self,
        budget: int,
        mode: Mode = "thread",
        *,
        seed: int = 0,
        check: bool = False,
        counting: bool = True,
        poison: bool | None = None,
        ignore: Callable[[str, str], bool] | None = None,
        at_once: Collection[Lane] = (),
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        host_threads: int | None = None,
    ) -> None:
        self._mode, self._seed = mode, seed
        self._checker = Checker() if check else None
        self._clocks: WeakKeyDictionary[Event, Clock] = WeakKeyDictionary()
        self._counts = counting
        self._poison = mode != "thread" if poison is None else poison
        self._ignore = ignore
        self._at_once = at_once
        self._compute_label = "compute"
        self._rates = {"h2d": h2d_bytes_per_s, "d2h": d2h_bytes_per_s} if mode == "thread" else {}
        super().__init__(budget, host_threads=host_threads)

    @override
    def _open_lanes(self, threads: Mapping[str, int]) -> Lanes:
        self._runner = self._links = LinkRunner(self._rates)
        run = partial(_run, self._runner)  # which does not refer to this device, or nobody would collect it
        if self._mode == "thread":
            return Lanes(run, threads=threads)
        return CallerLanes(run, seed=self._seed if self._mode == "random" else None)

    def _advance(self) -> None:
        if isinstance(self._lanes, CallerLanes):
            self._lanes.advance()

    # -- arena -------------------------------------------------------------------------------------------------------

    @override
    def _new_arena(self, nbytes: int) -> Arena:
        arena = super()._new_arena(nbytes)
        self._spoil(arena.slab)
        if self._checker is not None:
            self._checker.forget_memory()
        return arena

    @override
    def place(self, offset: int, nbytes: int, label: str = "") -> Buffer:
        buffer = super().place(offset, nbytes, label)
        if self._checker is not None:
            self._checker.place(buffer)
        return buffer

    @override
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        after = self._kept(f"free {buffer.label}", after)
        if self._checker is not None:
            self._checker.free(buffer, [*self._times(after), self._checker.mark(self._compute_label)])
        if self._poison and buffer.nbytes:
            view = buffer.bytes
            pending = [event for event in (*after, *buffer.inherited) if not event.finished]
            if pending:
                poison = Task(UNORDERED, partial(_fill, view), behind=pending, label=f"poison {buffer.label}")
                self._lanes.submit(poison)
                after = [*after, poison]
            else:
                with plain_torch():
                    _fill(view)
        super().free(buffer, after)

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
        after, released = self._kept(label, after), self._released(label, writes)
        clock: Clock = ()
        if self._checker is not None:
            clock = self._checker.task(lane, label, self._times(after, released), reads, writes, strand=op)
            task = partial(_run_told, task, [cell for cell in writes if isinstance(cell, HostCopy)])
        options = {"label": label, "op": op, "nbytes": nbytes, "urgency": urgency}
        event = super().submit(lane, task, after=after, reads=reads, writes=released, **options)  # type: ignore[arg-type]
        self._clocks[event] = clock
        if lane in self._at_once:
            self._lanes.finish([event])
        return event

    @override
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        self._advance()
        if self._checker is None:
            return super().mark(reads=reads, writes=writes)
        mark = Task.past("compute", "compute")
        self._clocks[mark] = self._checker.mark(self._compute_label, reads, writes)
        return mark

    @override
    def wait(self, *events: Event, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> None:
        events, released = tuple(self._kept("compute", events)), self._released("compute", writes)
        clocks = self._times(events, released)
        self._advance()
        super().wait(*events, reads=reads, writes=released)
        if self._checker is not None:
            self._checker.wait(self._compute_label, clocks, reads, writes)

    @override
    def synchronize(self, *events: Event) -> None:
        events = tuple(self._kept("compute", events))
        super().synchronize(*events)
        if self._checker is not None:
            self._checker.synchronize(self._times(events))

    @override
    def drain(self) -> None:
        try:
            super().drain()
        finally:
            if self._checker is not None:
                self._checker.drain()

    def _kept(self, label: str, events: Sequence[Event]) -> list[Event]:
        """Return ``events`` without those that are to be ignored by ``label``."""
        return [event for event in events if self._ignore is None or not self._ignore(label, event.label)]

    def _released(self, label: str, writes: Sequence[Cell]) -> list[Buffer]:
        """Return the ranges that are to be written after their releases, without those to be ignored by ``label``."""
        ranges = [cell for cell in writes if isinstance(cell, Buffer)]
        if self._ignore is None:
            return ranges
        known = [self._checker.history(buffer).releases if self._checker else buffer.releases for buffer in ranges]
        return [
            buffer
            for buffer, releases in zip(ranges, known, strict=True)
            if not (releases and self._ignore(label, f"release {buffer.label}"))
        ]

    def _times(self, events: Sequence[Event], released: Sequence[Buffer] = ()) -> list[Clock]:
        """Return the clocks of ``events`` and of what comes before writes to ``released``."""
        if self._checker is None:
            return []
        clocks = [clock for buffer in released for clock in self._checker.history(buffer).releases]
        return [*(self._clocks[event] for event in events), *clocks]

    # -- memory outside the arena ------------------------------------------------------------------------------------

    @override
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().host_empty(shape, dtype)
        self._spoil(tensor)
        return tensor

    @override
    def host_group(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        span, tensors = super().host_group(parts)
        self._spoil(span)
        return span, tensors

    @override
    def empty_all(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        tensors = super().empty_all(parts)
        self._spoil(*tensors)
        return tensors

    def _spoil(self, *tensors: torch.Tensor) -> None:
        """Overwrite the storages of ``tensors``."""
        if self._poison:
            with plain_torch():
                for tensor in tensors:
                    _fill(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))

    @override
    def cross(self, lane: Lane, nbytes: int) -> None:
        """Copies pause meanwhile, and nothing is computed; see :class:`LinkRunner`."""
        self._links.cross(lane, nbytes)

    @contextmanager
    @override
    def _counting(self, *, everything: bool) -> Iterator[None]:
        if not self._counts:
            yield
            return
        with super()._counting(everything=everything):
            yield

    # -- figures -----------------------------------------------------------------------------------------------------

    @override
    def begin_compute(self, op: int, label: str) -> object:
        self._compute_label = label
        return super().begin_compute(op, label)

    @override
    def end_compute(self, token: object) -> None:
        self._compute_label = "compute"
        super().end_compute(token)


def _fill(view: torch.Tensor) -> None:
    view.fill_(POISON)


def _run(execute: Callable[[Task], None], task: Task) -> None:
    if task.lane == UNORDERED:
        assert task.work is not None
        task.work()
    else:
        execute(task)


def _run_told(task: Callable[[], None], written: Sequence[HostCopy]) -> None:
    """Run a task; the snapshots that hold what it has written must have been told before."""
    task()
    for cell in written:
        snapshots = cell.group.snapshots
        wanted = snapshots is not None and snapshots.wants(cell.group.hosts)
        assert not wanted, f"{cell.label} was written, and a snapshot of it had not been told"
