"""Sums over a checkpoint file, which tell that its bytes are those that were written.

Torch's archives hold a sum (CRC-32) of each record. Its reader does not look at them where the file is mapped, so that
a bit that a disk or a copy has turned would train on without a word.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lt_offload.errors import ConfigError

_PIECE = 1 << 20
"""Bytes that a thread reads at once: in memory of its own, as pages of a mapped file would count as the process's."""
_THREADS = 8
_LOCAL_HEADER = 30
"""Bytes before the name of a record; the last four are the lengths of the name and of the extra field."""


@dataclass(frozen=True, slots=True)
class _Summed:
    name: str
    offset: int
    nbytes: int
    crc: int


def check(path: Path, checkpoint: Mapping[str, Any], *, only: str | None = None) -> None:
    """Compare the records of the local file ``path`` with their sums, several at a time.

    A file without sums (no archive, or one that was written with torch's ``compute_crc32=False``) is taken as it is.

    Args:
        path: the file.
        checkpoint: what was loaded from it, mapped.
        only: the part whose tensors are needed; None: all. Everything else than tensors is compared in any case.

    Raises:
        ConfigError: if one differs; names the tensor.
    """
    if not zipfile.is_zipfile(path):
        return
    with path.open("rb") as file:
        summed = list(_records(file))
        if not any(record.crc for record in summed):
            return
        names = _tensors(checkpoint, path)
        if only is not None:
            idle = names.keys() - _tensors({only: checkpoint[only]}, path).keys()
            summed = [record for record in summed if record.offset not in idle]
        # The largest first, so that no thread is left alone with one at the end.
        summed.sort(key=lambda record: -record.nbytes)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            whole = threads.map(lambda record: _crc(file.fileno(), record) == record.crc, summed)
            damaged = [record for record, good in zip(summed, whole, strict=True) if not good]
    if damaged:
        first = names.get(damaged[0].offset, damaged[0].name)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise ConfigError(
            f"checkpoint {str(path)!r} is damaged: {first}{more} is not what was written there, by its sum; "
            "give another checkpoint, or copy this one again"
        )


def _records(file: Any) -> Iterator[_Summed]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:  # not by torch
                continue
            header = os.pread(file.fileno(), _LOCAL_HEADER, entry.header_offset)
            # Not the directory's lengths: torch pads this header so that data begin at multiples of 64.
            lengths = int.from_bytes(header[-4:-2], "little") + int.from_bytes(header[-2:], "little")
            yield _Summed(entry.filename, entry.header_offset + _LOCAL_HEADER + lengths, entry.file_size, entry.CRC)


def _crc(file: int, record: _Summed) -> int:
    """Return the CRC-32 of the bytes on disk; the interpreter lock is free while they are read and added up."""
    piece = memoryview(bytearray(min(_PIECE, record.nbytes)))
    crc = done = 0
    while done < record.nbytes:
        # With an offset, as all threads read from one open file.
        count = os.preadv(file, [piece[: record.nbytes - done]], record.offset + done)
        if not count:
            break
        crc = zlib.crc32(piece[:count], crc)
        done += count
    return crc


def _tensors(checkpoint: Mapping[str, Any], path: Path) -> dict[int, str]:
    """Return the names of the tensors of ``checkpoint`` that are pages of ``path``, by offset in that file."""
    mapped = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.rstrip("\n").endswith(f" {path.resolve()}"):
                addresses, _, at, *_ = line.split()
                start, end = (int(address, 16) for address in addresses.split("-"))
                mapped.append((start, end, int(at, 16)))
    names: dict[int, str] = {}
    for name, tensor in _leaves(checkpoint, ""):
        address = tensor.untyped_storage().data_ptr()
        for start, end, offset in mapped:
            if start <= address < end:
                names.setdefault(address - start + offset, name)
    return names


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(part, f"{name}.{key}" if name else str(key))
