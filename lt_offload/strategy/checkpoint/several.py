"""One checkpoint file that several processes write at the same time, each what it owns.

The first process lays the file out (:mod:`archive`) and sends each of the others the places of its records. Each writes
its bytes into the one open file and reports their CRC-32. The first one writes its own, waits for the others', writes
the headers, and gives the file its name once it is on disk. The result is one plain file: as complete or absent, and as
readable by others, as if one process had written it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lt_offload.errors import CheckpointError, OffloadError, ProcessError
from lt_offload.execute.training.host_copies import HostCopies, HostCopy
from lt_offload.strategy.checkpoint import archive
from lt_offload.strategy.checkpoint.files import (
    Reading,
    Record,
    explained,
    flush,
    is_locked,
    make_room,
    partial_name,
    records,
)

if TYPE_CHECKING:
    from lt_offload.distributed.peers import Peers

_PIECE = 4 << 20
"""Bytes that are added up and written at once, so that they are in the processor's cache for the second."""
_ABOUT_OFFSETS = {".format_version", ".storage_alignment"}
"""Records about the places of others in files of torch's own writer."""
_VERSION = Record("version", "3\n", None, 2)
"""The version of torch's archives, which its own writer adds in the end."""
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Order:
    """One record for another process to write."""

    copy: HostCopy
    nbytes: int
    offset: int


class NewFile:
    """The partial file in the first process.

    Args:
        path: the final name.
        checkpoint: the content.
        others: rank and host copy of the process that writes a storage, by the storage's address.
        size: number of processes.

    Raises:
        CheckpointError: if it does not fit or cannot be made.
    """

    def __init__(
        self, path: Path, checkpoint: dict[str, Any], others: dict[int, tuple[int, HostCopy]], size: int
    ) -> None:
        content = [r for r in records(checkpoint) if r.name not in _ABOUT_OFFSETS] + [_VERSION]
        make_room(content, path)
        self._target, self._entries = path, archive.lay_out([(record.name, record.nbytes) for record in content])
        self.own: list[Record] = []
        """Records that this process writes."""
        self.orders: list[list[Order]] = [[] for _ in range(size)]
        """Records that the others write, by rank."""
        for record, entry in zip(content, self._entries, strict=True):
            record.offset = entry.data
            rank, copy = others.get(record.address, (0, None))
            if copy is None:
                self.own.append(record)
            else:
                self.orders[rank].append(Order(copy, record.nbytes, entry.data))
        try:
            self._partial, self.descriptor = _locked_file(path)
            os.ftruncate(self.descriptor, archive.end_of(self._entries))
        except OSError as error:
            raise CheckpointError(explained(path, error)) from error

    def finish(self, sums: dict[int, int]) -> None:
        """Write headers and table of contents with the CRC-32 ``sums`` by offset, and give the file its name."""
        for entry in self._entries:
            _write(self.descriptor, entry.local(sums[entry.data]), entry.header)
        _write(self.descriptor, archive.contents(self._entries, sums), archive.end_of(self._entries))
        # First the bytes, of all processes, then the name: after a power cut the target is the old file or the new one.
        flush(self._partial)
        self._partial.replace(self._target)
        os.close(self.descriptor)
        flush(self._target.parent)

    def discard(self) -> None:
        """Remove the partial file."""
        self._partial.unlink(missing_ok=True)
        with suppress(OSError):
            os.close(self.descriptor)


class FilePart:
    """One process's part in writing a file. All processes make theirs, from the threads that drive training.

    Args:
        peers: the processes, all on one machine.
        path: of the file.
        checkpoint: the content; that of the first process is written.
        copies: the host copies.

    Raises:
        CheckpointError: if there is no room, or it cannot be made.
        ProcessError: if another process finds that out.
    """

    def __init__(self, peers: Peers, path: Path, checkpoint: dict[str, Any], copies: HostCopies) -> None:
        self._peers, self._path = peers, path
        self._new: NewFile | None = None
        self._over = False

        def begin() -> tuple[str, list[list[Order]]] | None:
            if peers.rank:
                return None
            self._new = NewFile(path, checkpoint, copies.saved_by_others(), peers.size)
            return f"checkpoint {next(_serial)}", self._new.orders

        try:
            told, *_ = peers.together(begin)
            assert told is not None
            self._subject, orders = told
            self._writers = [rank for rank, of_one in enumerate(orders) if of_one]
            self._descriptor = peers.share_file(self._its_descriptor, by=0)
        except BaseException:
            if self._new is not None:
                self._new.discard()
            raise
        self.records = self._new.own if self._new is not None else _ordered(orders[peers.rank], copies)
        """Records that this process writes, in any order."""

    def _its_descriptor(self) -> int:
        assert self._new is not None
        return self._new.descriptor

    def write(self, records: Iterable[Record], read: Reading) -> None:
        """Write this process's part; in the first process return when the file is complete.

        Args:
            records: those of :attr:`records`, in the order in which they are read.
            read: encloses reading a storage.

        Raises:
            CheckpointError: if this process cannot write its part; nothing is left of the file.
            ProcessError: if another one cannot, or has ended meanwhile.
        """
        self._over = True
        if self._new is None:
            self._write_for_first(records, read)
            return
        try:
            sums = _fill(self._descriptor, records, read)
            for rank in self._writers:
                sums.update(self._received(rank))
            self._new.finish(sums)
        except BaseException as error:
            self._new.discard()
            self._raise(error)

    def close(self) -> None:
        """Give up a part that was not written."""
        if self._over:
            return
        self._over = True
        if self._new is not None:
            self._new.discard()
        else:
            os.close(self._descriptor)
            self._tell({"error": f"its part of {self._path} was given up"})

    def _write_for_first(self, records: Iterable[Record], read: Reading) -> None:
        try:
            sums = _fill(self._descriptor, records, read)
        except BaseException as error:
            self._tell({"error": self._said(error)})
            self._raise(error)
        finally:
            os.close(self._descriptor)
        self._tell({"sums": list(sums.items())})

    def _tell(self, what: dict[str, Any]) -> None:
        if self._peers.rank in self._writers:
            self._peers.send(f"{self._subject}/{self._peers.rank}", json.dumps(what))

    def _received(self, rank: int) -> dict[int, int]:
        message = json.loads(self._peers.receive(f"{self._subject}/{rank}"))
        if "error" in message:
            raise ProcessError(f"process {rank} failed: {message['error']}")
        return dict(message["sums"])

    def _raise(self, error: BaseException) -> NoReturn:
        if isinstance(error, OSError) and not isinstance(error, OffloadError):
            raise CheckpointError(explained(self._path, error)) from error
        raise error

    def _said(self, error: BaseException) -> str:
        if isinstance(error, OffloadError):
            return str(error)
        return explained(self._path, error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _ordered(orders: Sequence[Order], copies: HostCopies) -> list[Record]:
    own = []
    for order in orders:
        storage = copies.memory(order.copy)
        assert storage.nbytes() == order.nbytes, f"{order.copy} has {storage.nbytes()} bytes here, not {order.nbytes}"
        own.append(Record("", None, storage, order.nbytes, order.offset))
    return own


def _fill(descriptor: int, records: Iterable[Record], read: Reading) -> dict[int, int]:
    """Write ``records`` to their places and return their CRC-32, by their offsets."""
    sums = {}
    for record in records:
        if record.storage is None:
            content = record.content.encode() if isinstance(record.content, str) else record.content or b""
            sums[record.offset] = _write(descriptor, content[: record.nbytes], record.offset)
            continue
        with read(record.storage) as storage:
            sums[record.offset] = _write(descriptor, _bytes(storage), record.offset)
    return sums


def _bytes(storage: torch.UntypedStorage) -> memoryview | bytes:
    if not storage.nbytes():
        return b""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(descriptor: int, content: bytes | memoryview, at: int) -> int:
    """Write all of ``content`` from ``at`` on; return its CRC-32. Other threads may run meanwhile."""
    whole, crc = memoryview(content), 0
    for begin in range(0, len(whole), _PIECE):
        piece = whole[begin : begin + _PIECE]
        crc = zlib.crc32(piece, crc)
        done = 0
        while done < len(piece):
            written = os.pwrite(descriptor, piece[done:], at + begin + done)
            if not written:
                raise OSError(errno.EIO, "nothing more can be written")
            done += written
    return crc


def _locked_file(path: Path) -> tuple[Path, int]:
    """Make a partial file for ``path``, and lock it: the mark of a process that lives and writes it."""
    # A name of its own: what a killed run has left might still be written to by another process of that run.
    partial = partial_name(path, f"{os.getpid()}-{next(_serial)}")
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_locked(descriptor, partial):
            return partial, descriptor
        os.close(descriptor)  # another process took the new file for a leftover before it was locked
