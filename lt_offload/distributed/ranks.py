"""The connections between the processes of a run: what one says to all, and what all say to each other."""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lt_offload.compat.torch import default_store
from lt_offload.distributed import sums
from lt_offload.distributed.files import OpenFile
from lt_offload.distributed.watch import PeerWatch
from lt_offload.errors import ConfigError, ProcessError, first_line

Value = TypeVar("Value")
_TIMEOUT = timedelta(minutes=30)
"""For those that are late: they may be downloading. Whoever has failed is noticed by ``watch``."""
_FIRST_POLL_S, _LONGEST_POLL_S = 2e-5, 2e-3
LONG_S = 60.0
"""Whoever has waited so long says for whom: it may be at work, or hang, and cannot be told from outside."""


def initialize(device: str, *, rank: int, size: int) -> None:
    """Let ``torch.distributed`` connect the processes, unless it has; where the first one is says the environment.

    Args:
        device: its type; with ``"cuda"`` there is NCCL beside gloo, where torch has it.
        rank: of this process.
        size: how many there are.

    Raises:
        ConfigError: if they do not come together, or are connected in another way already.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
        try:
            library: Any = dist  # whose types leave these two out
            store, *_ = next(library.rendezvous("env://", rank, size, timeout=_TIMEOUT))
            # torchrun's store outlives processes that it starts again: they would find addresses of those before them.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = library.PrefixStore(f"lt_offload/{attempt}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConfigError(
                f"process {rank} did not find the other {size - 1} of this run at {where}: {first_line(error)}; "
                "check that all were started and reach MASTER_ADDR and MASTER_PORT"
            ) from error
        atexit.register(_disconnect)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"torch.distributed connects {dist.get_world_size()} processes already, and this run has {size}: use as "
            "many devices, or call torch.distributed.destroy_process_group() before"
        )


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """This process and the others of its run, connected; ``torch.distributed`` has been initialised.

    What is said here goes through groups of its own, and always from the thread that drives training: collectives of
    users, of Lightning and of the engine never meet. Everybody makes these groups in the same order, here.

    Args:
        on_device: whether gradients that are on a GPU are added up there, where torch has NCCL.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.control: Any = dist.new_group(backend="gloo")
        """The group of what is said about the run."""
        self._gradients: Any = dist.new_group(backend="gloo")
        there = on_device and dist.is_nccl_available()
        self._on_device: Any = dist.new_group(backend="nccl") if there else None
        self.watch = PeerWatch(default_store(), self.rank, self.size, self.control.group_name)

    def close(self) -> None:
        """Stop watching the others; the connections end with those of ``torch.distributed``."""
        self.watch.close()

    # -- what is said ------------------------------------------------------------------------------------------------

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of ranks."""
        found: list[Any] = [None] * self.size
        self._objects(lambda: dist.all_gather_object(found, value, group=self.control))
        return found

    def from_first(self, value: Value) -> Value:
        """Return the first process's value."""
        found: list[Any] = [value]
        self._objects(lambda: dist.broadcast_object_list(found, src=0, group=self.control))
        received: Value = found[0]
        return received

    def together(self, work: Callable[[], Value]) -> list[Value]:
        """Return what ``work`` gives in each process; if one of them fails, all do, and say why.

        While they work nobody counts as gone for being silent: a solver may hold the interpreter for long.

        Raises:
            ProcessError: if it is another one.
        """
        error: Exception | None = None
        value: Any = None
        strict, self.watch.strict = self.watch.strict, False
        try:
            value = work()
        except Exception as raised:
            error = raised
            self.watch.tell(raised)
        found = self.gather((None if error is None else f"{type(error).__name__}: {error}", value))
        self.watch.strict = strict
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(found):
            if text is not None:
                raise ProcessError(f"process {rank} failed: {text}")
        return [value for _, value in found]

    def of_first(self, work: Callable[[], Value]) -> Value:
        """Return what ``work`` gives in the first process, the only one that does it; its error is everybody's."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _objects(self, collective: Callable[[], Any]) -> None:
        # First a barrier that notices who is gone: those that exchange objects cannot be interrupted.
        self.barrier()
        self._translated(collective)

    def barrier(self) -> None:
        """Wait for all processes."""
        self._wait(self._translated(lambda: dist.barrier(group=self.control, async_op=True)))

    def reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce a ``tensor`` in host memory, in place."""
        self._wait(self._translated(lambda: dist.all_reduce(tensor, op=op, group=self.control, async_op=True)))

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Let ``tensors``, which are in host memory, be the first process's."""
        for tensor in tensors:
            sent = tensor.contiguous()
            flat = sent.view(-1).view(torch.uint8)
            self._wait(self._translated(partial(dist.broadcast, flat, src=0, group=self.control, async_op=True)))
            if sent is not tensor:
                tensor.copy_(sent)

    def share_file(self, make: Callable[[], int], by: int) -> int:
        """Return a descriptor of the file that ``make`` opens in process ``by``; it is to be closed.

        Raises:
            ConfigError: if a process cannot have it.
        """
        mine = self.rank == by
        told = self.together(lambda: OpenFile.of(make()) if mine else None)[by]
        assert told is not None
        return self.together(lambda: told.descriptor if mine else told.open())[self.rank]

    def check(self) -> None:
        """Raise ``ProcessError`` if another process has failed."""
        self.watch.check()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def numbers_of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the small ``numbers`` of all processes, in the order of ranks; all give as many."""
        own = torch.tensor(numbers, dtype=torch.uint8)
        found = own.new_empty(self.size * own.numel())
        self._wait(self._translated(lambda: sums.gather_single(found, own, group=self._gradients, async_op=True)))
        rows: list[list[int]] = found.view(self.size, -1).tolist()
        return rows

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Let each of ``tensors`` be its sum over all processes, in the order of ranks; see :func:`sums.add_up`."""
        if self._on_device is None:
            homes = [tensor.cpu() for tensor in tensors]
            self._add_up(homes, self._gradients)
            for tensor, home in zip(tensors, homes, strict=True):
                if tensor is not home:
                    tensor.copy_(home)
            return
        self._add_up([tensor for tensor in tensors if tensor.device.type != "cpu"], self._on_device)
        self._add_up([tensor for tensor in tensors if tensor.device.type == "cpu"], self._gradients)

    def _add_up(self, tensors: Sequence[Tensor], group: Any) -> None:
        if tensors:
            self._translated(lambda: sums.add_up(tensors, group, self._wait))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, work: Any) -> None:
        """Wait for a collective that has begun, or until another process has failed.

        Raises:
            ProcessError: if one has.
        """
        pause, began, said = _FIRST_POLL_S, time.monotonic(), False
        while not work.is_completed():
            self.watch.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
            if not said and self.watch.strict and time.monotonic() - began > LONG_S:
                said = True
                self._say_for_whom()
        self._translated(work.wait)

    def _say_for_whom(self) -> None:
        late = self.watch.late()
        if late is not None:
            warnings.warn(
                f"offmate: process {self.rank} has waited {LONG_S:g} s for the others, at batch {self.watch.batch}: "
                f"{late}",
                stacklevel=2,
            )

    def _translated(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` does; an error of a connection becomes the one that has closed it."""
        try:
            return call()
        except ProcessError:
            raise
        except RuntimeError as error:
            raise self.watch.explain(error) from error
