"""Ctrl-C and SIGTERM while training: the first waits for the end of the iteration, the second does not."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only


class Interrupts:
    """Handlers that remember the first SIGINT or SIGTERM between ``install`` and ``remove``.

    A SIGINT handler of the user's own is left alone. The handler that SIGTERM had before (a Trainer's) is called by
    ``pass_on``, once there is nothing more to lose. Python lets only the main thread handle signals: elsewhere
    nothing is installed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at_once = False
        """True if the first signal, too, ends the run without waiting."""
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Handle both signals from now on."""
        self.received = None
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)

    def remove(self) -> None:
        """Put the handlers back that were there before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:  # else somebody else's by now
                signal.signal(number, handler)

    def pass_on(self) -> None:
        """Remove ours, and give a SIGTERM to the handler that was there before."""
        handler = self._before.get(signal.SIGTERM)
        self.remove()
        if self.received == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None and not self.at_once:
            self.received = signal.Signals(number)
            what = "again" if number == signal.SIGINT else "Ctrl-C"
            # not print: this may run in the middle of another write to the same stream
            name = self.received.name
            text = f"\n{name}: a checkpoint follows when what is computed now is done; {what} stops at once\n"
            if getattr(rank_zero_only, "rank", 0) == 0:  # else another process says it
                os.write(2, text.encode())
            return
        self.remove()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # By the system, so that whoever waits for this process sees which signal has ended it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
