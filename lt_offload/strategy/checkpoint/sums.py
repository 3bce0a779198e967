"""Sums over a checkpoint file, which tell that its bytes are those that were written.

Torch's archives hold a sum (CRC-32) of each record. Its reader does not look at them where the file is mapped, so that
a bit that a disk or a copy has turned would train on without a word.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lt_offload.errors import ConfigError
from lt_offload.nested import leaves

_PIECE = 1 << 20
"""Bytes that a thread reads at once: in memory of its own, as pages of a mapped file would count as the process's."""
_THREADS = 8
_LOCAL_HEADER = 30
"""Bytes before the name of a record; the last four are the lengths of the name and of the extra field."""


def check(path: Path, checkpoint: Mapping[str, Any], *, only: str | None = None) -> None:
    """Compare the records of the local file ``path`` with their sums, several at a time.

    A file without sums (no archive, or one that was written with torch's ``compute_crc32=False``) is taken as it is.
    ``only`` is the part whose tensors are needed; None: all. Everything else than tensors is compared in any case.
    Raises ``ConfigError`` if one differs; names the tensor.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        # Torch compresses nothing.
        summed = [record for record in archive.infolist() if record.compress_type == zipfile.ZIP_STORED]
    if not any(record.CRC for record in summed):
        return
    names = _tensors(checkpoint, path)
    if only is not None:
        idle = names.keys() - _tensors({only: checkpoint[only]}, path).keys()
        summed = [record for record in summed if _offset(path, record) not in idle]
    # The largest first, and then in turn, so that all threads have about as much to do.
    summed.sort(key=lambda record: -record.file_size)
    count = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as threads:
        parts = threads.map(partial(_damaged, path), (summed[i::count] for i in range(count)))
        damaged = sorted((record for part in parts for record in part), key=lambda record: -record.file_size)
    if damaged:
        first = names.get(_offset(path, damaged[0]), damaged[0].filename)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise ConfigError(
            f"checkpoint {str(path)!r} is damaged: {first}{more} is not what was written there, by its sum; "
            "give another checkpoint, or copy this one again"
        )


def _damaged(path: Path, records: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """Return those of ``records`` whose bytes on disk have another CRC-32; other threads run meanwhile."""
    damaged = []
    with zipfile.ZipFile(path) as archive:
        for record in records:
            try:
                with archive.open(record) as content:
                    while content.read(_PIECE):
                        pass
            except (zipfile.BadZipFile, EOFError, RuntimeError):
                damaged.append(record)
    return damaged


def _offset(path: Path, record: zipfile.ZipInfo) -> int:
    with path.open("rb") as file:
        file.seek(record.header_offset)
        header = file.read(_LOCAL_HEADER)
    # Not the directory's lengths: torch pads this header so that data begin at multiples of 64.
    lengths = int.from_bytes(header[-4:-2], "little") + int.from_bytes(header[-2:], "little")
    return record.header_offset + _LOCAL_HEADER + lengths


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
    for name, tensor in leaves(checkpoint):
        if not isinstance(tensor, Tensor):
            continue
        address = tensor.untyped_storage().data_ptr()
        for start, end, offset in mapped:
            if start <= address < end:
                names.setdefault(address - start + offset, name)
    return names
