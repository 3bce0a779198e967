"""A device in RAM: a budgeted arena, asynchronous lanes and an account of every allocation; the CPU is its processor.

It makes the numbers of a CPU run and fails where a device of that size would fail. It says nothing about speed. Tests
make it hostile (``tests/support/hostile/``): lanes that run tasks as late as possible or in random order, links of a
given speed, freed memory that is overwritten, and a happens-before checker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from lt_offload.errors import BEYOND_THE_PLAN, OverBudget, UnsupportedError
from lt_offload.execute.device.arena import Arena
from lt_offload.execute.device.base import Buffer, Cell, Device, Event
from lt_offload.execute.device.lanes import Lanes, Task, TaskRunner, plain_torch
from lt_offload.machine.accounting import Account
from lt_offload.machine.heap import keep_freed_memory
from lt_offload.machine.host_memory import HostMemory


class DeviceAccount(Account):
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
        """True if all that operations make is device memory, else only what they make from device memory."""

    def _meet(self, storage: torch.UntypedStorage, func: Any, operands: list[torch.Tensor]) -> None:
        charges = (self._charge_of(tensor.untyped_storage()) for tensor in operands)
        if self.everything or any(charge is not None and charge.nbytes > 0 for charge in charges):
            super()._meet(storage, func, operands)

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


class EmulatedDevice(Device):
    """A device of ``budget`` bytes, in RAM.

    ``host_threads``: threads that an update on the ``host`` lane may use; None: as many as the calling thread.
    """

    torch_device = torch.device("cpu")

    def __init__(self, budget: int, *, host_threads: int | None = None) -> None:
        self.budget = budget
        self._runner = TaskRunner()
        self._lanes = self._open_lanes({"host": host_threads} if host_threads else {})
        self._past = Task.past("compute", "compute")
        self._entered = False
        self._host = HostMemory()
        self._closed = False
        # Neither lanes nor account refer to the device: it is collected, and its threads end, even if nobody closes it.
        self._account = DeviceAccount(budget, self._lanes)
        self._stop = weakref.finalize(self, _release, self._lanes, keep_freed_memory())
        self._arena = self._new_arena(0)

    def _open_lanes(self, threads: Mapping[str, int]) -> Lanes:
        return Lanes(self._runner, threads=threads)

    # -- arena -------------------------------------------------------------------------------------------------------

    @override
    def _new_arena(self, nbytes: int) -> Arena:
        with plain_torch():
            slab = torch.empty(nbytes, dtype=torch.uint8)
        self._account.charge(slab)
        return Arena(slab)

    @override
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        # Ranges change hands in the order of issue. Whoever takes this one next is ordered after its last users, so
        # that memory is reused without waiting for them.
        self._arena.free(buffer, [event for event in (*after, *buffer.inherited) if not event.finished])

    # -- lanes and events --------------------------------------------------------------------------------------------

    @override
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        return self._past

    # -- memory outside the arena ------------------------------------------------------------------------------------

    @override
    def zero_copy_view(self, host: torch.Tensor) -> torch.Tensor:
        if not host.is_contiguous():
            raise UnsupportedError("a tensor that is not contiguous cannot be read in host memory; call .contiguous()")
        with torch.inference_mode(False):
            return host.detach()

    @override
    def empty_all(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        tensors = super().empty_all(parts)
        if self._entered:  # all at once: the account as a mode would take longer for each than all of them take
            self._account.charge(*tensors)
        return tensors

    @override
    def accounting(self, signature: object = None) -> AbstractContextManager[None]:
        return self._counting(everything=True)

    @override
    def between(self) -> AbstractContextManager[None]:
        return self._counting(everything=False)

    @contextmanager
    def _counting(self, *, everything: bool) -> Iterator[None]:
        account = self._account
        before, account.everything = account.everything, everything
        outermost = not self._entered
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

    # -- figures -----------------------------------------------------------------------------------------------------

    @override
    def memory(self) -> int:
        return self._account.current

    @override
    def peak_memory(self) -> int:
        return self._account.peak

    @override
    def reset_peak(self) -> None:
        self._account.reset_peak()

    @override
    def close(self) -> None:
        self._stop()  # a finalizer runs once
        if not self._closed:
            self._closed = True
            self._arena = self._new_arena(0)
            self._lanes.check()


def _release(lanes: Lanes, forget: Callable[[], None]) -> None:
    lanes.stop()
    forget()
