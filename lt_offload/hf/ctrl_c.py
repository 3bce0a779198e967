"""Ctrl-C while a Trainer trains: the update is ended, a checkpoint written, and then the training stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CtrlC:
    """Whether the user has pressed Ctrl-C."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Within the context the first Ctrl-C is noted only, and the second one stops at once.

        Elsewhere than in the main thread, or where the user has a handler, it is left to whoever has it.
        """
        self.asked = False
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is note:
                signal.signal(signal.SIGINT, signal.default_int_handler)
