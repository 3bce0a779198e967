"""Messages of a process to another one: any thread writes them, and the writer never waits for a reader.

Collectives belong to the thread that drives training, and all processes come to them in one order. A thread that writes
a checkpoint beside it uses the store of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST_POLL_S, _LONGEST_POLL_S = 1e-3, 2e-2


class Letters:
    """The letters of one run.

    Args:
        store: of ``torch.distributed``; this gets a connection of its own.
        name: of the run; the store may have had others before.
        check: raises an error if another process has failed.
    """

    def __init__(self, store: Any, name: str, check: Callable[[], None]) -> None:
        self._store, self._run_name, self._check = store.clone(), f"lt_offload/{name}/letters", check

    def send(self, subject: str, text: str) -> None:
        """Leave ``text``; nobody has used ``subject`` before, or it has been received."""
        self._store.set(f"{self._run_name}/{subject}", text)

    def receive(self, subject: str) -> str:
        """Wait for the text, and take it away.

        Raises:
            ProcessError: if another process has failed.
        """
        key, pause = f"{self._run_name}/{subject}", _FIRST_POLL_S
        while not self._store.check([key]):
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        text: str = self._store.get(key).decode()
        self._store.delete_key(key)
        return text
