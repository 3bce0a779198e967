"""Notices that another process of a run has failed, is gone or hangs, and says so where this one waits for it.

The store of the run has one text of each process, which is written anew once per second and has a number that counts
up, and one of what has gone wrong: whoever fails, or notices that another one is gone, writes it, and the first text
stays. A thread of every process reads all of it, and is told by the system when a process of the same machine has
ended. Who waits for others asks what that thread has seen (:meth:`PeerWatch.check`), so that the first error is told by
all and nobody waits for half an hour.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from lt_offload.errors import OffloadError, ProcessError, first_line

BEAT_S = 1.0
"""Seconds between two numbers."""
_MOMENT_S = BEAT_S / 20
"""Seconds between two looks at what the thread has seen."""
SILENCE_S = 40.0
"""A process whose number stays the same for so long does not run any more."""
_PATIENCE = 2
"""A process that finds a connection closed looks so often for the reason: a machine may stand still for any time."""
_QUIET = 3
"""If nobody says it by then, a process of another machine that was silent in so many looks was the one."""
_ANSWER_S = 10.0
"""Limit for an answer of the store; a process that closes its watch waits so long for its thread."""
_PAUSE_S = 5.0
"""A process that has done nothing itself for so long cannot say of others that they were silent meanwhile."""
_RUNS, _LEFT, _CLOSED = "runs", "left", "closed"
"""States of a process: it runs, it knows that the run has failed, or it has ended as it should."""


@dataclass
class _Peer:
    """Another process, as far as this one knows it."""

    said: str = ""
    """Its text; empty: it has not said anything."""
    heard: float = field(default_factory=time.monotonic)
    """Time when the text was new."""
    silent: int = 0
    """Looks since then."""
    pid: int = 0
    batch: int = -1
    """The batch that it is at; -1: it has not begun to train."""
    state: str = _RUNS
    where: str = ""
    """Its machine, and the space that its number is from."""
    ended: int | None = None
    """Descriptor that becomes readable when the process ends; None: it is elsewhere."""
    missing: bool = False
    """True if it has ended without a word, or does not answer."""

    def __str__(self) -> str:
        return f"{self.pid} on {self.where.partition(' ')[0]}"

    @property
    def gone(self) -> bool:
        """True if it was a process of this machine and has ended."""
        return self.ended is not None and bool(select.select([self.ended], [], [], 0)[0])

    def read(self, text: str, here: str) -> None:
        """Learn from its ``text``; the system tells when one ends that is ``here``."""
        self.silent += 1
        if text == self.said:
            return
        self.said, self.heard, self.silent = text, time.monotonic(), 0
        pid, batch, self.state, _, self.where = text.split(" ", 4)
        self.batch = int(batch)
        if not self.pid and self.where == here:
            with suppress(OSError):
                self.ended = os.pidfd_open(int(pid))
        self.pid = int(pid)


class PeerWatch:
    """Watches the processes of a run.

    The ``store`` of the run may have had others before, which failed: ``name`` tells this one from them. ``machine`` is
    the number of this process's machine in the run.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, machine: int = 0) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._peers = {other: _Peer() for other in range(size) if other != rank}
        self._rank, self._run_name = rank, f"lt_offload/{name}"
        self._own = ""
        """The error of this process, as it has told it."""
        self.failure: str | None = None
        """The process that has failed and why, in words; None if none has, as far as is known."""
        self._state, self._number, self._looks = _RUNS, 0, 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._woken, self._wake = os.pipe()
        self._asked: float | None = None
        """Time since which the thread waits for the store: without end, where the process that has it is stopped."""
        self._checked = self._looked = self._counted = time.monotonic()
        """Times when this process last asked what the thread has seen, when that last looked, and from which silence of
        others counts."""
        self.strict = False
        """True if a process that does not answer counts as gone: not while each prepares itself."""
        self.batch = -1
        """The batch that this process is at."""
        self._here = f"{_here()} {machine}"
        """Other numbers of machines are other machines: they may be tried out on one."""
        self._say()
        self._thread = threading.Thread(target=self._run, name="lt_offload-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the others need not wonder when this process ends."""
        if self.failure is None:
            with suppress(Exception):
                self._say(_CLOSED)
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
        if isinstance(error, ProcessError) or self.failure is not None:
            return
        text = str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"
        self._own = f"process {self._rank} failed: {text}"
        self._fail(self._own)

    def leave(self, patience: float) -> None:
        """Wait until all others that live know that this process fails, about ``patience`` seconds at most."""
        with suppress(Exception):
            self._say(_LEFT)
            # Not by the clock, which goes on while the machine stands still.
            for _ in range(int(patience / _MOMENT_S)):
                if all(map(self._knows, self._peers.values())):
                    return
                time.sleep(_MOMENT_S)
                self._read_all()

    @staticmethod
    def _knows(peer: _Peer) -> bool:
        return peer.missing or peer.gone or peer.state != _RUNS

    def check(self) -> None:
        """Raise ``ProcessError`` if another process has failed; called again and again by whoever waits."""
        since, now = self._asked, time.monotonic()
        if self._asked is not None and now - self._checked > _PAUSE_S:
            self._asked = now
        elif self.strict and since is not None and now - since > SILENCE_S and self.failure is None:
            self._silent(0, self._peers.get(0, _Peer()), now - since)
        self._checked = now
        if self.failure is not None:
            raise ProcessError(self.failure)

    def explain(self, error: Exception) -> ProcessError:
        """Return what ``error`` of a collective comes from, once it is known."""
        began, limit = self._looks, time.monotonic() + 2 * SILENCE_S
        # One that was alone on its machine has nobody there who tells.
        elsewhere = [other for other, peer in self._peers.items() if peer.ended is None]
        most = 2 * _QUIET if elsewhere else _PATIENCE
        while self.failure is None and self._thread.is_alive() and time.monotonic() < limit:
            time.sleep(_MOMENT_S)
            if (looks := self._looks - began) > most:
                break
            quietest = max(elsewhere, key=lambda other: self._peers[other].silent, default=None)
            if quietest is not None and min(looks, self._peers[quietest].silent) > _QUIET:
                self._ended(quietest, self._peers[quietest])
        return ProcessError(self.failure or f"another process ended without a word, killed perhaps: {error}")

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

    def _say(self, state: str | None = None) -> None:
        with self._alone():
            # Made within: the thread's text of a moment ago would stand over "closed", and the process seem killed.
            self._state, self._number = state or self._state, self._number + 1
            text = f"{os.getpid()} {self.batch} {self._state} {self._number} {self._here}"
            self._store.set(f"{self._run_name}/{self._rank}", text)

    def _fail(self, why: str) -> None:
        """Say what has gone wrong, to all, unless something was said before: this is a consequence of that, mostly."""
        first = why
        with suppress(Exception), self._alone():
            first = self._store.compare_set(f"{self._run_name}/failure", "", why).decode()
        self._learn(first)

    def _learn(self, why: str) -> None:
        if why != self._own:
            self.failure = self.failure or why

    def _read_all(self) -> None:
        keys = {other: f"{self._run_name}/{other}" for other in self._peers}
        failure = f"{self._run_name}/failure"
        with self._alone():
            all_there = self._store.check([*keys.values()])
            known = keys if all_there else {other: key for other, key in keys.items() if self._store.check([key])}
            texts = self._store.multi_get([*known.values()]) if known else []
            first = self._store.get(failure).decode() if self._store.check([failure]) else self._own
        for other, text in zip(known, texts, strict=True):
            self._peers[other].read(text.decode(), self._here)
        self._learn(first)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_ANSWER_S):
            raise TimeoutError("the store of the run does not answer")
        try:
            yield
        finally:
            self._lock.release()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            now = time.monotonic()
            # This process was stopped, or something held the interpreter.
            if not self.strict or now - self._looked > _PAUSE_S:
                self._counted = now
            self._looked = self._asked = now
            try:
                self._say()
                self._look()
            except Exception as error:
                # An answer may be late because the machine stood still; a store that is gone says so again at once.
                if time.monotonic() - now < _PAUSE_S:
                    self._no_store(error)
                    return
            finally:
                self._asked = None
            self._sleep()

    def _sleep(self) -> None:
        known = [peer.ended for peer in self._peers.values() if peer.ended is not None and not peer.gone]
        with suppress(OSError):
            select.select([self._woken, *known], [], [], BEAT_S)

    def _look(self) -> None:
        """See whether something has gone wrong, and whether processes have ended or have been silent for too long."""
        # Before they are read: one that said that it would end and ended in between would count as killed.
        gone = [other for other, peer in self._peers.items() if peer.gone]
        self._read_all()
        self._looks += 1
        for other, peer in self._peers.items():
            # To the beginning of this look: if the machine has stood still since, others were not silent meanwhile.
            silence = self._looked - max(peer.heard, self._counted)
            if other in gone and peer.state != _CLOSED:
                self._ended(other, peer)
            elif other not in gone and silence > SILENCE_S:
                self._silent(other, peer, silence)

    def _ended(self, other: int, peer: _Peer) -> None:
        """Say that a process is not there any more, unless more has been said of it."""
        if not peer.missing:
            peer.missing = True
            self._fail(f"process {other} ({peer}) ended without a word, killed perhaps")

    def _silent(self, other: int, peer: _Peer, seconds: float) -> None:
        if peer.missing:
            return
        peer.missing = True
        why = f"process {other} ({peer}) has not answered for {seconds:.0f} s: it is stopped, or its machine is"
        if other > 0:
            self._fail(why)
        else:  # nobody may answer, who has the store
            self._learn(why)
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
        while first.ended is not None and not first.gone and time.monotonic() < until:
            time.sleep(BEAT_S / 50)
        how = "ended without a word, killed perhaps" if first.gone else f"is gone: {first_line(error)}"
        self._learn(f"process 0 ({first}) {how}")


def _here() -> str:
    """Return this machine, and the space in which numbers of processes are unique: a container may have its own."""
    space = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        space = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {space}"
