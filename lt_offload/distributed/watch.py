"""Notices that another process of a run has failed, is gone or hangs, and says so where this one waits for it.

Each process writes a number that counts up to the store of the run, and, before anything else, why it fails. A thread
of every other one reads both, and is told by the system when a process of the same machine has ended; then it writes
that to the store, for other machines. Who waits for others asks what that thread has seen (:meth:`PeerWatch.check`), so
that the first error is told by all and nobody waits for half an hour.

The first process has the store, and answers all others: each asks it four times per beat, however many there are. One
question is for the numbers of all, and one for how often anything else was written, which is read only if that is new.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lt_offload.errors import OffloadError, ProcessError, first_line

BEAT_S = 1.0
"""Seconds between two numbers."""
SILENCE_S = 40.0
"""A process whose number stays the same for so long does not run any more."""
_PATIENCE_S = 2.0
"""A process that finds a connection closed waits so long for the reason."""
_QUIET_S = 3.0
"""If nobody says it by then, a process of another machine that has been silent for so long was the one."""
_ANSWER_S = 10.0
"""Limit for an answer of the store; a process that closes its watch waits so long for its thread."""
_PAUSE_S = 5.0
"""A process that has done nothing itself for so long cannot say of others that they were silent meanwhile."""


@dataclass
class _Peer:
    """Another process, as far as this one knows it."""

    where: str = ""
    """Its machine, and the space that its number is from; empty: it has not said so."""
    pid: int = 0
    beat: str = ""
    since: float = 0.0
    """Time when the number was new, or silence did not count yet."""
    heard: float = 0.0
    """Time when the number was new."""
    batch: int = -1
    """The batch that it is at; -1: it has not begun to train."""
    ended: int | None = None
    """Descriptor that becomes readable when the process ends; None: it is elsewhere."""
    missing: bool = False
    """True if it does not answer, or somebody has said that it ended without a word."""

    def __str__(self) -> str:
        return f"{self.pid} on {self.where.partition(' ')[0]}"


class PeerWatch:
    """Watches the processes of a run.

    Args:
        store: of the run; it gets a connection of its own.
        rank: of this process.
        size: how many there are.
        name: of the run; the store may have had others before, which failed.
        machine: the number of this process's machine in the run.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, machine: int = 0) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))
        now = time.monotonic()
        self._peers = {other: _Peer(since=now, heard=now) for other in range(size) if other != rank}
        self._rank, self._run_name = rank, f"lt_offload/{name}"
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._woken, self._wake = os.pipe()
        self._asked: float | None = None
        """Time since which the thread waits for the store: without end, where the process that has it is stopped."""
        self._checked = self._looked = time.monotonic()
        """Times when this process last asked what the thread has seen, and when that last looked."""
        self.strict = False
        """True if a process that does not answer counts as gone: not while each prepares itself."""
        self.batch = -1
        """The batch that this process is at."""
        self._here = f"{_here()} {machine}"
        """Other numbers of machines are other machines: they may be tried out on one."""
        self._news = 0
        """Number of writes, but for those of numbers, when this process last read all of them."""
        self._set("where", f"{os.getpid()} {self._here}")
        self._thread = threading.Thread(target=self._run, name="lt_offload-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the others need not wonder when this process ends."""
        if self._failure is None:
            with suppress(Exception):
                self._tell_all("closed", "")
        self._closed.set()
        # Without this, closing would wait for the thread to the end of its beat.
        os.write(self._wake, b".")
        self._thread.join(timeout=_ANSWER_S)
        if self._thread.is_alive():  # it waits for the store, and will find that all is over
            return
        for number in (self._woken, self._wake, *(peer.ended for peer in self._peers.values())):
            if number is not None:
                os.close(number)

    def tell(self, error: BaseException) -> None:
        """Tell the others that this process fails with ``error``, unless it fails because of another one."""
        if isinstance(error, ProcessError) or self._failure is not None:
            return
        text = str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"
        with suppress(Exception):
            self._tell_all("error", text)

    def leave(self, patience: float) -> None:
        """Wait until all others that live know that this process fails, ``patience`` seconds at most."""
        with suppress(Exception):
            self._set("left", "")
        until = time.monotonic() + patience
        waited = list(self._peers)
        with suppress(Exception):
            while waited and time.monotonic() < until:
                waited = [other for other in waited if not self._has_left(other)]
                time.sleep(BEAT_S / 20)

    def _has_left(self, other: int) -> bool:
        peer = self._peers[other]
        return peer.missing or self._is_gone(peer) or self._get("left", other) is not None

    def check(self) -> None:
        """Raise ``ProcessError`` if another process has failed; called again and again by whoever waits."""
        since, now = self._asked, time.monotonic()
        if self._asked is not None and now - self._checked > _PAUSE_S:
            self._asked = now
        elif self.strict and since is not None and now - since > SILENCE_S and self._failure is None:
            self._silent(0, self._peers.get(0, _Peer()), now - since)
        self._checked = now
        if self._failure is not None:
            raise ProcessError(self._failure)

    def explain(self, error: Exception) -> ProcessError:
        """Return what ``error`` of a collective comes from, once it is known."""
        began = time.monotonic()
        while self._failure is None and time.monotonic() < began + _PATIENCE_S:
            time.sleep(BEAT_S / 20)
        # One that was alone on its machine has nobody there who tells.
        elsewhere = [other for other, peer in self._peers.items() if peer.ended is None]
        while self._failure is None and elsewhere and time.monotonic() < began + 2 * _QUIET_S:
            quietest = min(elsewhere, key=lambda other: self._peers[other].heard)
            if time.monotonic() - max(began, self._peers[quietest].heard) > _QUIET_S:
                self._ended(quietest, self._peers[quietest])
            time.sleep(BEAT_S / 20)
        return ProcessError(self._failure or f"another process ended without a word, killed perhaps: {error}")

    @property
    def failure(self) -> str | None:
        """The process that has failed and why, in words; None if none has, as far as is known."""
        return self._failure

    def late(self) -> str | None:
        """Return which processes are at an earlier batch than this one; None if a process before this one says so."""
        behind = {rank: peer for rank, peer in self._peers.items() if peer.batch < self.batch}
        if any(rank < self._rank and rank not in behind for rank in self._peers):
            return None
        clauses = [
            f"process {rank} ({peer}) is {'at batch ' + str(peer.batch) if peer.batch >= 0 else 'not training yet'}"
            for rank, peer in behind.items()
        ]
        return ", ".join(clauses) or "none is at an earlier batch"

    # -- the store ---------------------------------------------------------------------------------------------------

    def _set(self, what: str, value: str, of: int | None = None) -> None:
        with self._alone():
            self._store.set(f"{self._run_name}/{what}/{self._rank if of is None else of}", value)

    def _tell_all(self, what: str, value: str, of: int | None = None) -> None:
        """Write what others read once they have seen that there is something new."""
        self._set(what, value, of)
        # Last: a reader that saw the count first would find nothing yet, and not look again.
        self._count(1)

    def _count(self, more: int) -> int:
        with self._alone():
            return int(self._store.add(f"{self._run_name}/news", more))

    def _of_all(self, what: str) -> dict[int, str]:
        """Return what each other process has written; in one question once all have."""
        keys = [f"{self._run_name}/{what}/{other}" for other in self._peers]
        with self._alone():
            if self._store.check(keys):
                return dict(zip(self._peers, (value.decode() for value in self._store.multi_get(keys)), strict=True))
        return {other: self._get(what, other) or "" for other in self._peers}

    def _get(self, what: str, rank: int) -> str | None:
        key = f"{self._run_name}/{what}/{rank}"
        with self._alone():
            return self._store.get(key).decode() if self._store.check([key]) else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=BEAT_S):
            raise TimeoutError("the store of the run does not answer")
        try:
            yield
        finally:
            self._lock.release()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while not self._closed.is_set():
            number += 1
            now = time.monotonic()
            if now - self._looked > _PAUSE_S:  # stopped, or something held the interpreter
                for peer in self._peers.values():
                    peer.since = now
            self._looked = self._asked = now
            try:
                self._set("beat", f"{number} {self.batch}")
                self._look()
            except TimeoutError:
                pass
            except Exception as error:
                self._no_store(error)
                return
            finally:
                self._asked = None
            self._sleep()

    def _sleep(self) -> None:
        """Wait for the next beat, or until a process of this machine ends."""
        known = [peer.ended for peer in self._peers.values() if peer.ended is not None and not self._is_gone(peer)]
        with suppress(OSError):
            select.select([self._woken, *known], [], [], BEAT_S)

    def _look(self) -> None:
        """See whether other processes have said why they fail, have ended, or have been silent for too long."""
        if not all(peer.where for peer in self._peers.values()):
            self._meet(self._of_all("where"))
        # Before they are asked: one that told its error and ended in between would count as ended without a word.
        gone = {other for other, peer in self._peers.items() if self._is_gone(peer)}
        news, beats = self._count(0), self._of_all("beat")
        for other, peer in self._peers.items():
            if other in gone or news != self._news:
                self._read(other, peer, gone=other in gone)
            if other not in gone:
                self._listen(other, peer, beats[other])
        self._news = news

    def _meet(self, told: Mapping[int, str]) -> None:
        """Learn who the others are, as far as they have told, and be told by the system when one here ends."""
        for other, peer in self._peers.items():
            if peer.where or not told[other]:
                continue
            number, _, peer.where = told[other].partition(" ")
            peer.pid = int(number)
            if peer.where == self._here:
                with suppress(OSError):
                    peer.ended = os.pidfd_open(peer.pid)

    def _read(self, other: int, peer: _Peer, *, gone: bool) -> None:
        """Read what was written of another process, which may be ``gone``."""
        error = self._get("error", other)
        if error is not None:
            self._failed(f"process {other} failed: {error}")
        elif gone and self._get("closed", other) is None:
            self._ended(other, peer)
        elif not gone and peer.ended is None and (why := self._get("ended", other)) is not None:
            peer.missing = True
            self._failed(why)

    def _ended(self, other: int, peer: _Peer) -> None:
        """Say, on other machines, too, that a process is not there any more, unless more has been said of it."""
        if peer.missing:
            return
        why = f"process {other} ({peer}) ended without a word, killed perhaps"
        peer.missing = True
        self._failed(why)
        with suppress(Exception):
            self._tell_all("ended", why, of=other)

    def _listen(self, other: int, peer: _Peer, beat: str) -> None:
        now = time.monotonic()
        if beat != peer.beat:
            peer.heard = now
        if beat != peer.beat or not self.strict:
            peer.beat, peer.since = beat, now
            peer.batch = int(beat.partition(" ")[2] or -1)
        if now - peer.since > SILENCE_S:
            self._silent(other, peer, now - peer.since)

    def _silent(self, other: int, peer: _Peer, seconds: float) -> None:
        if peer.missing:
            return
        peer.missing = True
        why = f"process {other} ({peer}) has not answered for {seconds:.0f} s: it is stopped, or its machine is"
        self._failed(why)
        if other > 0:  # or nobody may answer, who has the store
            with suppress(Exception):
                self._tell_all("ended", why, of=other)
        # It holds its connections open while it is stopped, and whoever waits for them would never end.
        if peer.where == self._here and peer.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(peer.pid, signal.SIGKILL)

    def _no_store(self, error: Exception) -> None:
        """Say what it means that the first process, which has the store of the run, has closed it."""
        first = self._peers.get(0)
        if self._closed.is_set() or first is None:
            return
        until = time.monotonic() + BEAT_S  # connections are closed a moment before the process has ended
        while first.ended is not None and not self._is_gone(first) and time.monotonic() < until:
            time.sleep(BEAT_S / 50)
        how = "ended without a word, killed perhaps" if self._is_gone(first) else f"is gone: {first_line(error)}"
        self._failed(f"process 0 ({first}) {how}")

    def _is_gone(self, peer: _Peer) -> bool:
        return peer.ended is not None and bool(select.select([peer.ended], [], [], 0)[0])

    def _failed(self, why: str | None) -> None:
        # The first one stays: later ones are mostly its consequences, in processes that waited for that one.
        self._failure = self._failure or why


def _here() -> str:
    """Return this machine, and the space in which numbers of processes are unique: a container may have its own."""
    space = ""
    with suppress(OSError):
        space = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {space}"
