"""New checkpoint files, which are complete or absent, filled by one process or by several.

A file is a zip archive like those of ``torch.save``: records without compression whose bytes begin at multiples of 64,
with a CRC-32 of each. Torch's own writer takes one record after the other, in one process. Here the places of all
records are known before anything is written, so that they are written in any order, straight from their storages, into
a partial file next to the target, which replaces the target once it is on disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lt_offload.compat.torch import address_of, save_records
from lt_offload.errors import CheckpointError, OffloadError
from lt_offload.replacing import new_file, new_part
from lt_offload.units import format_bytes, round_up

Reading = Callable[[torch.UntypedStorage], AbstractContextManager[torch.UntypedStorage]]
"""A context around reading a storage; yields the storage with the bytes to save."""
ALIGNMENT = 64
"""Bytes: as torch aligns storages, so that tensors of a mapped file may begin anywhere."""
_FOLDER = "archive/"
"""The prefix of each name, which torch's reader takes from the first one."""
_HEADER = 30 + 20 + 4
"""Most bytes of a record's header beside its name: numbers of 64 bits and an empty padding included."""
_PADDING = 0x4246
"""Torch's mark of an extra field that is padding."""
_ABOUT_OFFSETS = {".format_version", ".storage_alignment"}
"""Records about the places of others in files of torch's own writer."""
_PIECE = 4 << 20
"""Bytes that are added up and written at once, so that they are in the processor's cache for the second."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Record:
    """One file in the archive of a checkpoint."""

    name: str
    content: str | bytes | None
    storage: torch.UntypedStorage | None
    """The bytes, in place of ``content``."""
    nbytes: int
    header: int = 0
    """Offset of its header in the file."""
    offset: int = 0
    """Offset of its bytes."""

    @property
    def address(self) -> int:
        """The address of ``storage``; 0 without one."""
        return 0 if self.storage is None else address_of(self.storage)


class _Collector:
    """A stand-in for torch's archive that keeps its records: storages as they are, everything else pickled."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write_record(self, name: str, content: Any, nbytes: int) -> None:
        """Keep the record."""
        storage = content if isinstance(content, torch.UntypedStorage) else None
        self.records.append(Record(name, content if storage is None else None, storage, nbytes))


def _records_of(checkpoint: dict[str, Any]) -> list[Record]:
    """Return the records that ``torch.save`` writes, in its order."""
    collector = _Collector()
    serialize: Any = save_records
    serialize(checkpoint, collector, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    collector.write_record("version", "3\n", 2)  # of the format; torch's own writer adds it in the end
    return [record for record in collector.records if record.name not in _ABOUT_OFFSETS]


def lay_out(records: Iterable[Record]) -> int:
    """Give ``records`` their places, one behind the other; return the offset behind the last one."""
    end = 0
    for record in records:
        record.header = end
        record.offset = round_up(end + _HEADER + len(_FOLDER) + len(record.name), ALIGNMENT)
        end = record.offset + record.nbytes
    return end


class NewFile:
    """A file that is written in place of ``path``, whose previous contents stay until the new ones are on disk.

    Raises ``CheckpointError`` if the disk has no room for it beside the old one, or if it cannot be made.
    """

    def __init__(self, path: Path, checkpoint: dict[str, Any]) -> None:
        self.path, self._all = path, _records_of(checkpoint)
        self._end = lay_out(self._all)
        self._over = False
        self.records = [*self._all]
        """The records to write, in any order."""
        with explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Before the first byte is written: filling the disk up would make other programs fail, too.
            if self._end > shutil.disk_usage(path.parent).free:
                raise OSError(errno.ENOSPC, f"it takes {format_bytes(self._end)}")
            self._partial, descriptor = new_part(path, new_file)
            self._file = os.fdopen(descriptor, "r+b")

    @property
    def descriptor(self) -> int:
        """The open file's."""
        return self._file.fileno()

    def write(
        self, records: Iterable[Record], read: Reading, by_others: Callable[[], Mapping[int, int]] = dict
    ) -> None:
        """Write ``records`` and give the file its name; if that fails, nothing is left of the new file.

        ``read`` encloses reading a storage. ``by_others`` waits for other processes, which write the rest, and returns
        their CRC-32 by offset. Raises ``CheckpointError`` if the disk is full, or the folder cannot be written any
        more.
        """
        try:
            with explaining(self.path):
                self._finish({**fill(self.descriptor, records, read), **by_others()})
            self._over = True
        finally:
            self.close()

    def _finish(self, sums: Mapping[int, int]) -> None:
        """Write headers and table of contents with the CRC-32 ``sums`` by offset, and give the file its name."""
        entries = []
        for record in self._all:
            entry = zipfile.ZipInfo(_FOLDER + record.name)
            entry.header_offset, entry.CRC = record.header, sums[record.offset]
            entry.file_size = entry.compress_size = record.nbytes
            # The header ends where the bytes begin.
            padding = record.offset - record.header - len(entry.FileHeader()) - 4
            entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
            _write(self.descriptor, entry.FileHeader(), record.header)
            entry.extra = b""
            entries.append(entry)
        with zipfile.ZipFile(self._file, "w") as archive:
            archive.filelist, archive.start_dir = entries, self._end
        # First the bytes, of all processes, then the name: after a power cut the target is the old file or the new one.
        flush(self._partial)
        self._partial.replace(self.path)
        flush(self.path.parent)  # the renaming, too, survives a power cut

    def close(self) -> None:
        """Let go of the file; remove it if it is not complete."""
        if not self._over:
            self._over = True
            with suppress(OSError):  # or this would be told in place of what has failed
                self._partial.unlink(missing_ok=True)
        with suppress(OSError):
            self._file.close()


def fill(descriptor: int, records: Iterable[Record], read: Reading) -> dict[int, int]:
    """Write ``records`` to their places and return their CRC-32, by their offsets."""
    sums = {}
    for record in records:
        if record.storage is None:
            content = record.content.encode() if isinstance(record.content, str) else record.content or b""
            sums[record.offset] = _write(descriptor, content[: record.nbytes], record.offset)
            continue
        with read(record.storage) as storage:
            memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()) if storage.nbytes() else b""
            sums[record.offset] = _write(descriptor, memoryview(memory).cast("B"), record.offset)
    return sums


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


def flush(path: Path) -> None:
    """Wait until the written bytes of a file or folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explaining(target: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` for the system's errors within the context, where ``target`` is written."""
    try:
        yield
    except OffloadError:
        raise
    except OSError as error:
        raise CheckpointError(explained(target, error)) from error


def explained(target: Path, error: OSError) -> str:
    """Return one sentence with the reason why ``target`` was not written, and the way out."""
    folder = next(parent for parent in target.parents if parent.exists())
    way_out = "choose another folder with dirpath= of ModelCheckpoint or trainer.default_root_dir"
    if error.errno in _FULL:
        size = f"{error.strerror}, " if error.strerror and "takes" in error.strerror else ""
        free = format_bytes(shutil.disk_usage(folder).free)
        return f"checkpoint {target} was not written, the disk is full ({size}{free} are free); make room, or {way_out}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"checkpoint {target} cannot be written, {folder} is read-only ({error.strerror}); {way_out}"
    return f"checkpoint {target} cannot be written: {error.strerror or error}; {way_out}"
