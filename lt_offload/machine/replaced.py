"""Attributes of libraries and their objects that are others for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Replaced:
    """An attribute that is another one, made of the original, while a context is open anywhere, in any thread."""

    def __init__(self, owner: Callable[[], Any], name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._changing = threading.RLock()
        self._open = 0
        self.original: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the attribute be the other one within the context."""
        owner = self._owner()
        with self._changing:
            if not self._open:
                self.original = getattr(owner, self._name)
                self._present = self._make(self.original)
                setattr(owner, self._name, self._present)
            self._open += 1
        try:
            yield
        finally:
            with self._changing:
                self._open -= 1
                # If somebody has put another one in front of ours meanwhile, it stays: ours does nothing by then.
                if not self._open and getattr(owner, self._name) is self._present:
                    setattr(owner, self._name, self.original)


@contextmanager
def own_attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let ``owner``, an object and not its class, have another attribute within the context."""
    before = dict(vars(owner))
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        if name in before:
            vars(owner)[name] = before[name]
