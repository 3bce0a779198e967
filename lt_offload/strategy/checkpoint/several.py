"""One checkpoint file that several processes write at the same time, each what it owns.

The first process lays the file out and sends each of the others the places of its records. Each writes its bytes into
the one open file and reports their CRC-32. The first one writes its own, waits for the others', and completes the file.
The result is one plain file: as complete or absent, and as readable by others, as if one process had written it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_offload.errors import OffloadError, ProcessError
from lt_offload.execute.training.host_copies import HostCopies, HostCopy
from lt_offload.strategy.checkpoint import archive
from lt_offload.strategy.checkpoint.archive import NewFile, Reading, Record, explaining

if TYPE_CHECKING:
    from lt_offload.distributed.peers import Peers

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Order:
    """One record for another process to write."""

    copy: HostCopy
    nbytes: int
    offset: int


class FilePart:
    """One process's part in writing a file. All processes make theirs, from the threads that drive training.

    The content is that of the first process's ``checkpoint``. Raises ``CheckpointError`` if there is no room, or it
    cannot be made, and ``ProcessError`` if another process finds that out.
    """

    def __init__(self, peers: Peers, path: Path, checkpoint: dict[str, Any], copies: HostCopies) -> None:
        self._peers, self.path = peers, path
        self._new: NewFile | None = None
        self._over = False
        self.records: list[Record] = []
        """Records that this process writes, in any order."""

        def begin() -> tuple[str, list[list[Order]]] | None:
            if peers.rank:
                return None
            self._new = NewFile(path, checkpoint)
            return f"checkpoint {next(_serial)}", self._divided(copies.saved_by_others())

        try:
            told, *_ = peers.together(begin)
            assert told is not None
            self._subject, orders = told
            self._writers = [rank for rank, of_one in enumerate(orders) if of_one]
            self._descriptor = peers.share_file(self._its_descriptor, by=0)
        except BaseException:
            if self._new is not None:
                self._new.close()
            raise
        if self._new is None:
            self.records = _ordered(orders[peers.rank], copies)

    def _divided(self, others: dict[int, tuple[int, HostCopy]]) -> list[list[Order]]:
        """Return the orders for each process, given who writes the storage at an address; this one's remain."""
        assert self._new is not None
        orders: list[list[Order]] = [[] for _ in range(self._peers.size)]
        for record in self._new.records:
            rank, copy = others.get(record.address, (0, None))
            if copy is None:
                self.records.append(record)
            else:
                orders[rank].append(Order(copy, record.nbytes, record.offset))
        return orders

    def _its_descriptor(self) -> int:
        assert self._new is not None
        return self._new.descriptor

    def write(self, records: Iterable[Record], read: Reading) -> None:
        """Write this process's part; in the first process return when the file is complete.

        ``records`` are those of :attr:`records`, in the order in which they are read; ``read`` encloses reading a
        storage. Raises ``CheckpointError`` if this process cannot write its part; nothing is left of the file, and
        ``ProcessError`` if another one cannot, or has ended meanwhile.
        """
        self._over = True
        if self._new is not None:
            self._new.write(records, read, self._sums_of_others)
            return
        try:
            with explaining(self.path):
                sums = archive.fill(self._descriptor, records, read)
        except BaseException as error:
            self._tell({"error": str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"})
            raise
        finally:
            os.close(self._descriptor)
        self._tell({"sums": list(sums.items())})

    def close(self) -> None:
        """Give up a part that was not written."""
        if self._over:
            return
        self._over = True
        if self._new is not None:
            self._new.close()
        else:
            os.close(self._descriptor)
            self._tell({"error": f"its part of {self.path} was given up"})

    def _tell(self, what: dict[str, Any]) -> None:
        if self._peers.rank in self._writers:
            self._peers.send(f"{self._subject}/{self._peers.rank}", json.dumps(what))

    def _sums_of_others(self) -> dict[int, int]:
        sums: dict[int, int] = {}
        for rank in self._writers:
            message = json.loads(self._peers.receive(f"{self._subject}/{rank}"))
            if "error" in message:
                raise ProcessError(f"process {rank} failed: {message['error']}")
            sums.update(message["sums"])
        return sums


def _ordered(orders: Sequence[Order], copies: HostCopies) -> list[Record]:
    own = []
    for order in orders:
        storage = copies.memory(order.copy)
        assert storage.nbytes() == order.nbytes, f"{order.copy} has {storage.nbytes()} bytes here, not {order.nbytes}"
        own.append(Record("", None, storage, order.nbytes, offset=order.offset))
    return own
