"""Host copies as they were at one moment, for a reader on another thread while training goes on.

Training changes host copies in place. A writer announces its change first (:meth:`Snapshots.changing`) and
goes on at once if all readers are through with it. If not, its contents are set aside in a copy, as far as there is
room for copies; where there is none, the change waits for the readers. No more is copied than is changed too early.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lt_offload.compat.torch import address_of
from lt_offload.errors import CheckpointError
from lt_offload.execute.device.lanes import plain_torch


class _Contents:
    """Contents of a storage until it is changed."""

    __slots__ = ("aside", "busy", "copying", "live", "wanted")

    def __init__(self, live: torch.UntypedStorage) -> None:
        self.live = live
        self.aside: torch.UntypedStorage | None = None
        """The copy, once it was changed."""
        self.wanted = 0
        """Snapshots that have not read it yet."""
        self.busy = 0
        """Snapshots that are reading ``live``."""
        self.copying = False


class Snapshots:
    """The snapshots of an engine's host copies that are being read. Any thread may call any of it."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._current: dict[int, _Contents] = {}
        """By storage: what is in it now, while somebody wants to read that."""
        self._room = 0
        self._over = False
        self.nbytes = 0
        """Bytes that have been set aside."""

    def take(self, storages: Mapping[torch.UntypedStorage, int], room: int) -> HostSnapshot:
        """Return a snapshot of ``storages`` as they are now; nobody changes them meanwhile.

        ``storages`` are changed only by those who say so before, in this order. Copies set aside may take ``room``
        bytes from now on, for all snapshots together.
        """
        with self._moved:
            self._room = room
            by_address: dict[int, _Contents] = {}
            for storage in storages:
                if address_of(storage) in by_address:
                    continue
                # An earlier snapshot may want the same contents: they share one copy.
                contents = self._current.setdefault(address_of(storage), _Contents(storage))
                contents.wanted += 1
                by_address[address_of(storage)] = contents
        return HostSnapshot(self, by_address, {address_of(storage): rank for storage, rank in storages.items()}, room)

    def wants(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether somebody wants to read what is in any of ``tensors`` now."""
        return bool(self._current) and any(address_of(tensor.untyped_storage()) in self._current for tensor in tensors)

    def changing(self, tensors: Iterable[Tensor]) -> None:
        """Set aside what is in ``tensors``, which are about to be changed, or wait until everybody has read it."""
        if not self._current:
            return
        for tensor in tensors:
            key = address_of(tensor.untyped_storage())
            if key in self._current:
                self._let_go(key)

    def _let_go(self, key: int) -> None:
        with self._moved:
            while (contents := self._current.get(key)) is not None:
                nbytes = contents.live.nbytes()
                # A reader that has begun reads the live memory to its end, so the change waits for it even where there
                # is room.
                if not (contents.busy or contents.copying) and self.nbytes + nbytes <= self._room:
                    contents.copying = True
                    self.nbytes += nbytes
                    break
                self._moved.wait()
            else:
                return
        with plain_torch():
            # Outside the lock, as it takes long; `copying` keeps readers and writers of this storage away meanwhile.
            aside = contents.live.clone()  # type: ignore[no-untyped-call]
        with self._moved:
            contents.copying, contents.aside = False, aside
            self._current.pop(key, None)
            if not contents.wanted:  # closed meanwhile
                self._forget(contents)
            self._moved.notify_all()

    def end(self) -> None:
        """Give up all snapshots: from now on nobody says what is about to be changed."""
        with self._moved:
            self._over = True
            self._current.clear()
            self._moved.notify_all()

    @contextmanager
    def _reading(self, contents: _Contents) -> Iterator[torch.UntypedStorage]:
        with self._moved:
            self._moved.wait_for(lambda: not contents.copying)
            self._check()
            source = contents.live if contents.aside is None else contents.aside
            # Counted before the lock is open: a writer that came in between would change what is about to be read.
            contents.busy += contents.aside is None
        try:
            yield source
        finally:
            with self._moved:
                contents.busy -= source is contents.live
                self._release(contents)
                self._moved.notify_all()
        self._check()

    def _check(self) -> None:
        if self._over:
            raise CheckpointError("a checkpoint was not written: training was left before all of it had been read")

    def _close(self, unread: Iterable[_Contents]) -> None:
        with self._moved:
            for contents in unread:
                self._release(contents)
            self._moved.notify_all()

    def _release(self, contents: _Contents) -> None:
        contents.wanted -= 1
        if contents.wanted or contents.copying:
            return
        if contents.aside is not None:
            self._forget(contents)
        elif self._current.get(address_of(contents.live)) is contents:
            del self._current[address_of(contents.live)]

    def _forget(self, contents: _Contents) -> None:
        assert contents.aside is not None
        self.nbytes -= contents.aside.nbytes()
        contents.aside = None


class HostSnapshot:
    """Storages as they were when it was taken. Each can be read once; :meth:`close` gives up the rest."""

    def __init__(self, owner: Snapshots, contents: dict[int, _Contents], order: Mapping[int, int], room: int) -> None:
        self._owner, self._unread = owner, contents
        self._order = order
        self.room = max(0, room)
        """Bytes that copies may take."""

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` is one of them."""
        return address_of(storage) in self._order

    def rank(self, storage: torch.UntypedStorage) -> int:
        """Return when training will change ``storage``, as a number: what is changed first should be read first."""
        return self._order.get(address_of(storage), -1)

    @contextmanager
    def reading(self, storage: torch.UntypedStorage) -> Iterator[torch.UntypedStorage]:
        """Enclose reading what was in ``storage``, which is in the storage that this yields."""
        with self._owner._reading(self._unread.pop(address_of(storage))) as source:
            yield source

    def close(self) -> None:
        """Let training change what has not been read, without a copy."""
        unread, self._unread = list(self._unread.values()), {}
        self._owner._close(unread)
