"""Processes that say things to each other and wait for each other: all of a run, or those of one machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from lt_offload.distributed.files import OpenFile
from lt_offload.distributed.watch import PeerWatch
from lt_offload.errors import ProcessError

Value = TypeVar("Value")
_FIRST_POLL_S, _LONGEST_POLL_S = 2e-5, 2e-3
LONG_S = 60.0
"""Whoever has waited so long says for whom: it may be at work, or hang, and cannot be told from outside."""


class Peers:
    """This process and others; what they are asked, all are asked in the same order, by the thread that trains.

    Args:
        ranks: their numbers in the run, in order.
        control: the group of ``torch.distributed`` in which they talk.
        watch: notices who has failed.
    """

    def __init__(self, ranks: Sequence[int], control: Any, watch: PeerWatch) -> None:
        self.ranks, self.control, self.watch = tuple(ranks), control, watch
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of ranks."""
        found: list[Any] = [None] * self.size
        self._objects(lambda: dist.all_gather_object(found, value, group=self.control))
        return found

    def together(self, work: Callable[[], Value]) -> list[Value]:
        """Return what ``work`` gives in each process; if one of them fails, all do, and say why.

        While they work nobody counts as gone for being silent: a solver may hold the interpreter for long.

        Raises:
            ProcessError: if it is another one.
        """
        strict, self.watch.strict = self.watch.strict, False
        try:
            value = work()
            found: list[tuple[str | None, Value]] = self.gather((None, value))
        except ProcessError:
            raise
        except Exception as error:
            self.watch.tell(error)
            # Others that have heard of it have left by now, perhaps; what this one says is its own error.
            with suppress(ProcessError):
                self.gather((f"{type(error).__name__}: {error}", None))
            raise
        finally:
            self.watch.strict = strict
        for rank, (text, _) in enumerate(found):
            if text is not None:
                raise ProcessError(f"process {self.ranks[rank]} failed: {text}")
        return [value for _, value in found]

    def _objects(self, collective: Callable[[], Any]) -> None:
        # First a barrier that notices who is gone: those that exchange objects cannot be interrupted.
        self.barrier()
        self.translated(collective)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.wait(self.translated(lambda: dist.barrier(group=self.control, async_op=True)))

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

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
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
        self.translated(work.wait)

    def _say_for_whom(self) -> None:
        late = self.watch.late()
        if late is not None:
            warnings.warn(
                f"offmate: process {self.rank} has waited {LONG_S:g} s for the others, at batch {self.watch.batch}: "
                f"{late}",
                stacklevel=2,
            )

    def translated(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` does; an error of a connection becomes the one that has closed it."""
        try:
            return call()
        except ProcessError:
            raise
        except RuntimeError as error:
            raise self.watch.explain(error) from error
