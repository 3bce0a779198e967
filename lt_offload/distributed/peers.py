"""Processes that say things to each other and wait for each other: all of a run, or those of one machine."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from lt_offload.distributed.sums import gather_single
from lt_offload.distributed.watch import PeerWatch
from lt_offload.errors import ConfigError, OffloadError, ProcessError

Value = TypeVar("Value")
_FIRST_POLL_S, _LONGEST_POLL_S, _LETTER_POLL_S = 2e-5, 2e-3, 1e-2
_PLACE_BYTES, _LENGTH_BYTES, _TOLD_BYTES = 64, 8, 952
"""Parts of one message: a process's place, the length of its text, and that; a longer text takes a second message."""
LONG_S = 60.0
"""A process that has waited so long says for whom: from outside, one at work looks like one that hangs."""


class Peers:
    """This process and others; what they are asked, all are asked in the same order, by the thread that trains.

    Before they wait for each other each says where it is (:meth:`meet`): a process that stops, validates or saves while
    another one goes on is named in both, where each would wait for something else for half an hour. ``ranks`` are their
    numbers in the run, ``control`` is the group in which they talk. The ``store`` takes messages of threads that do not
    come to all processes in one order.
    """

    def __init__(self, ranks: Sequence[int], control: Any, watch: PeerWatch, store: Any) -> None:
        self.ranks, self.control, self.watch, self._store = tuple(ranks), control, watch, store
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)

    def meet(self, place: str, told: bytes = b"") -> list[bytes]:
        """Wait for all processes, which have to be at the same ``place``; return what each tells, in their order.

        ``place`` is in the words of an error. Raises ``ConfigError`` in all processes, if one of them is at another
        place, and ``ProcessError`` if another process has failed.
        """
        # Always as many bytes: processes that are not at the same place could not receive each other's else.
        said = place.encode("ascii", "replace")[:_PLACE_BYTES].ljust(_PLACE_BYTES)
        first = told[:_TOLD_BYTES].ljust(_TOLD_BYTES)
        rows = self._bytes_of_all(said + len(told).to_bytes(_LENGTH_BYTES, "big") + first)
        places = [row[:_PLACE_BYTES].decode().strip() for row in rows]
        if len(set(places)) > 1:
            raise _parted(self.ranks, places)
        lengths = [int.from_bytes(row[_PLACE_BYTES:][:_LENGTH_BYTES], "big") for row in rows]
        more = max(lengths) - _TOLD_BYTES
        rest = self._bytes_of_all(told[_TOLD_BYTES:].ljust(more)) if more > 0 else [b""] * self.size
        texts = [row[_PLACE_BYTES + _LENGTH_BYTES :] + others for row, others in zip(rows, rest, strict=True)]
        return [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def _bytes_of_all(self, own: bytes) -> list[bytes]:
        # No tensor is made: what an emulated device counts would include it.
        sent, received = bytearray(own), bytearray(self.size * len(own))
        output, source = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (received, sent))
        self.collective(lambda: gather_single(output, source, group=self.control, async_op=True))
        return [bytes(received[begin : begin + len(own)]) for begin in range(0, len(received), len(own))]

    def gather(self, value: Value, place: str = "an exchange of settings or results") -> list[Value]:
        """Return the values of all processes, in the order of ranks; ``place`` as for :meth:`meet`."""
        return [pickle.loads(told) for told in self.meet(place, pickle.dumps(value))]

    def together(self, work: Callable[[], Value]) -> list[Value]:
        """Return what ``work`` gives in each process; if one of them fails, all do, and say why.

        While they work nobody counts as gone for being silent: a solver may hold the interpreter for long. Raises
        ``ProcessError`` if it is another one.
        """
        strict, self.watch.strict = self.watch.strict, False
        try:
            value = work()
            outcomes: list[tuple[str | None, Value]] = self.gather((None, value))
        except ProcessError:
            raise
        except Exception as error:
            self.watch.tell(error)
            # Others that have heard of it have left by now, perhaps; what this one says is its own error.
            with suppress(ProcessError, ConfigError):
                self.gather((f"{type(error).__name__}: {error}", None))
            raise
        finally:
            self.watch.strict = strict
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise ProcessError(f"process {self.ranks[rank]} failed: {text}")
        return [value for _, value in outcomes]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; ``name`` says for what."""
        self.meet(f"the barrier {name!r}" if name else "a barrier")

    def share_file(self, make: Callable[[], int], by: int) -> int:
        """Return a descriptor of the file that ``make`` opens in process ``by``, to be closed; or ``ConfigError``."""
        mine = self.rank == by
        told = self.together(lambda: OpenFile.of(make()) if mine else None)[by]
        assert told is not None
        return self.together(lambda: told.descriptor if mine else told.open())[self.rank]

    def send(self, subject: str, text: str) -> None:
        """Leave ``text`` in the store; nobody has used ``subject`` before, or it has been received."""
        self._store.set(subject, text)

    def receive(self, subject: str) -> str:
        """Wait for what another process sends, and take it away; raises ``ProcessError`` if one has failed."""
        while not self._store.check([subject]):
            self.check()
            time.sleep(_LETTER_POLL_S)
        text: str = self._store.get(subject).decode()
        self._store.delete_key(subject)
        return text

    def check(self) -> None:
        """Raise ``ProcessError`` if another process has failed."""
        self.watch.check()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """Wait for a collective that has begun; raises ``ProcessError`` if another process has failed meanwhile."""
        began, said = time.monotonic(), False
        while not work.is_completed():
            self.watch.check()
            waited = time.monotonic() - began
            # A part of what was waited already, so that short collectives, of which sums have many, are not prolonged.
            time.sleep(min(max(waited / 8, _FIRST_POLL_S), _LONGEST_POLL_S))
            if not said and self.watch.strict and waited > LONG_S:
                said, late = True, self.watch.late()
                if late is not None:
                    what = f"process {self.rank} has waited {LONG_S:g} s for the others, at batch {self.watch.batch}"
                    warnings.warn(f"offmate: {what}: {late}", stacklevel=2)
        self.translated(work.wait)

    def collective(self, begin: Callable[[], Any]) -> None:
        """Begin a collective, and wait for it; raises ``ProcessError`` if another process has failed."""
        self.wait(self.translated(begin))

    def translated(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` does, which only sends and receives: its error becomes that of who has closed."""
        try:
            return call()
        except OffloadError:
            raise
        except RuntimeError as error:
            raise self.watch.explain(error) from error


def _parted(ranks: Sequence[int], places: Sequence[str]) -> ConfigError:
    told = [
        f"at {place} (process {', '.join(str(rank) for rank, at in zip(ranks, places, strict=True) if at == place)})"
        for place in dict.fromkeys(places)
    ]
    return ConfigError(
        f"the processes of this run do not do the same: they are {', '.join(told)}; give all of them as many batches "
        "(drop_last=True, limit_train_batches), and let all of them stop (trainer.should_stop), validate and save at "
        "the same time: trainer.strategy.reduce_boolean_decision(stop, all=False) decides for all"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFile:
    """A file without a name that a process of this machine has open, as it tells others."""

    process: int
    descriptor: int
    identity: tuple[int, int, int]
    """Device, inode and bytes: a process of another container may have the same number."""

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Return what this process tells of its own."""
        return cls(process=os.getpid(), descriptor=descriptor, identity=_identity(descriptor))

    def open(self) -> int:
        """Return a descriptor of this process, to be closed.

        Raises ``ConfigError`` if the system does not allow that, or the processes do not see each other.
        """
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        why = "it is another file there: the processes have process numbers of their own (containers)"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if _identity(opened) == self.identity:
                return opened
            os.close(opened)
        except OSError as error:
            why = str(error)
        raise ConfigError(
            f"devices: the processes of this machine share memory, and {path} cannot be opened: {why}; start all of "
            "them by the same user, in one container, with /proc mounted, or set devices=1"
        )


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size
