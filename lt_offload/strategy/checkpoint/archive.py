"""The layout of a checkpoint file before anything is written, so that several processes can fill it.

The file is a zip archive like those of ``torch.save``: records without compression whose bytes begin at multiples of
64, with a CRC-32 of each. Torch's own writer takes one record after the other, in one process. (Format: PKWARE's
APPNOTE 6.3, 4.3 to 4.5.)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lt_offload.units import round_up

ALIGNMENT = 64
"""Bytes: as torch aligns storages, so that tensors of a mapped file may begin anywhere."""
_FOLDER = "archive/"
"""The prefix of each name, which torch's reader takes from the first one."""
_VERSION = 45
"""The first version of the format with sizes of 64 bits."""
_1980 = 0x21
"""The first day that the format knows, as a date of all records."""
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
"""Marks in fields of 32 and 16 bits: the number stands elsewhere, in 64 bits."""
_LONG, _PADDING = 0x0001, 0x4246
"""Kinds of extra fields: numbers of 64 bits, and padding with torch's mark."""
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LONG_END = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """One record's place."""

    name: bytes
    header: int
    """Offset of its header."""
    data: int
    """Offset of its bytes."""
    nbytes: int

    @property
    def _is_long(self) -> bool:
        return self.nbytes >= _FULL

    def local(self, crc: int) -> bytes:
        """Return the bytes between ``header`` and ``data``."""
        extra = _extra(self.nbytes, self.nbytes) if self._is_long else b""
        size = _FULL if self._is_long else self.nbytes
        left = self.data - self.header - _LOCAL.size - len(self.name) - len(extra)
        extra += struct.pack("<HH", _PADDING, left - 4) + bytes(left - 4)
        fields = (b"PK\3\4", _VERSION, 0, 0, 0, _1980, crc, size, size, len(self.name), len(extra))
        return _LOCAL.pack(*fields) + self.name + extra

    def central(self, crc: int) -> bytes:
        """Return its line of the archive's table of contents."""
        size, at = (_FULL if self._is_long else self.nbytes), min(self.header, _FULL)
        long = ([self.nbytes] * 2 if self._is_long else []) + ([self.header] if at == _FULL else [])
        extra = _extra(*long) if long else b""
        sizes = (crc, size, size, len(self.name), len(extra))
        return _CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, _1980, *sizes, 0, 0, 0, 0, at) + self.name + extra


def lay_out(sizes: Sequence[tuple[str, int]]) -> list[RecordPlace]:
    """Return the places of records, given by their names and bytes, one behind the other."""
    places, end = [], 0
    for name, nbytes in sizes:
        full = f"{_FOLDER}{name}".encode()
        least = end + _LOCAL.size + len(full) + (len(_extra(0, 0)) if nbytes >= _FULL else 0) + 4
        places.append(RecordPlace(full, end, round_up(least, ALIGNMENT), nbytes))
        end = places[-1].data + nbytes
    return places


def end_of(entries: Sequence[RecordPlace]) -> int:
    """Return the offset of the table of contents."""
    return entries[-1].data + entries[-1].nbytes


def contents(entries: Sequence[RecordPlace], sums: Mapping[int, int]) -> bytes:
    """Return the table of contents, which ends the file; ``sums`` has each CRC-32, by the offset of the bytes."""
    table = b"".join(entry.central(sums[entry.data]) for entry in entries)
    start, count = end_of(entries), len(entries)
    end = b""
    if count >= _MANY or start + len(table) >= _FULL:
        fields = (_LONG_END.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(table), start)
        end += _LONG_END.pack(b"PK\6\6", *fields) + _LOCATOR.pack(b"PK\6\7", 0, start + len(table), 1)
    short = min(count, _MANY)
    end += _END.pack(b"PK\5\6", 0, 0, short, short, min(len(table), _FULL), min(start, _FULL), 0)
    return table + end


def _extra(*numbers: int) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", _LONG, 8 * len(numbers), *numbers)
