"""Notices that another process of a run has failed, is gone or hangs, and says so where this one waits for it.

Each process writes a number that counts up to the store of the run, and, before anything else, why it fails. A thread
of every other one reads both. Who waits for others asks what that thread has seen (:meth:`PeerWatch.check`), so that
the first error is told by all and nobody waits for half an hour.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lt_offload.errors import OffloadError, ProcessError

BEAT_S = 1.0
"""Between two numbers."""
SILENCE_S = 40.0
"""A process whose number stays the same for so long does not run any more."""
_PATIENCE_S = 2.0
"""Whoever finds a connection closed waits so long for the reason."""
_ANSWER_S = 20.0
"""The store answers within this time, or the process that holds it does not run."""


class PeerWatch:
    """Watches the processes of a run.

    Args:
        store: of the run; it gets a connection of its own.
        rank: of this process.
        size: how many there are.
        name: of the run; the store may have had others before, which failed.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._others = [other for other in range(size) if other != rank]
        self._rank, self._run_name = rank, f"lt_offload/{name}"
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beats: dict[int, tuple[str, float]] = {}
        self.strict = False
        """Whether a process that does not answer counts as gone: not while each prepares itself."""
        self._set("where", f"{socket.gethostname()} {os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="lt_offload-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=BEAT_S)

    def tell(self, error: BaseException) -> None:
        """Tell the others that this process fails with ``error``, unless it fails because of another one."""
        if isinstance(error, ProcessError) or self._failure is not None:
            return
        text = str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"
        with suppress(Exception):
            self._set("error", text)

    def leave(self, patience: float) -> None:
        """Wait until all others know that this process fails, ``patience`` seconds at most: they end with it."""
        with suppress(Exception):
            self._set("left", "")
        until = time.monotonic() + patience
        with suppress(Exception):
            while time.monotonic() < until and any(self._get("left", other) is None for other in self._others):
                time.sleep(BEAT_S / 20)

    def check(self) -> None:
        """Raise ``ProcessError`` if another process has failed."""
        if self._failure is not None:
            raise ProcessError(self._failure)

    def explain(self, error: Exception) -> ProcessError:
        """Return what ``error`` of a collective comes from, once it is known."""
        until = time.monotonic() + _PATIENCE_S
        while self._failure is None and time.monotonic() < until:
            time.sleep(BEAT_S / 20)
            self._look()
        return ProcessError(self._failure or f"another process ended without a word, killed perhaps: {error}")

    @property
    def failure(self) -> str | None:
        """Which process has failed and why; None if none has, as far as is known."""
        return self._failure

    def _set(self, what: str, value: str) -> None:
        with self._lock:
            self._store.set(f"{self._run_name}/{what}/{self._rank}", value)

    def _get(self, what: str, rank: int) -> str | None:
        key = f"{self._run_name}/{what}/{rank}"
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _run(self) -> None:
        number = 0
        while not self._ended.wait(BEAT_S):
            number += 1
            try:
                self._set("beat", str(number))
            except Exception as error:
                if self.strict and not self._ended.is_set():
                    self._failure = self._failure or f"the first process is gone, which has the run's store: {error}"
                return
            self._look()

    def _look(self) -> None:
        """See whether another process has said why it fails, or has been silent for too long."""
        with suppress(Exception):
            for other in self._others:
                found = self._get("error", other)
                if found is not None:
                    self._failure = self._failure or f"process {other} failed: {found}"
                self._listen(other)

    def _listen(self, other: int) -> None:
        beat, now = self._get("beat", other) or "", time.monotonic()
        known, since = self._beats.get(other, ("", now))
        if beat != known or not self.strict:
            since = now
        self._beats[other] = beat, since
        if now - since > SILENCE_S:
            where, _, number = (self._get("where", other) or "").partition(" ")
            self._failure = self._failure or (
                f"process {other} ({number} on {where}) has not answered for {SILENCE_S:g} s: it is stopped, or hangs"
            )
            # It holds its connections open while it is stopped, and whoever waits for them would never end.
            if where == socket.gethostname() and number:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(number), signal.SIGKILL)
