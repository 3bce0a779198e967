"""Safetensors files read straight into the memory where weights stay: one copy, in large pieces, at the disk's speed.

transformers maps such files into memory and lets weights be pages of them where the dtype is the same. That costs no
time at first, and all of it later, page by page, where a profile measures and training begins; the pages count as free
memory although weights that are trained take them; and a file that somebody writes to changes the model. So tensors
are read here, each into memory of its own that goes back to the system as soon as the engine has taken its contents,
and handed to transformers one by one, which converts, renames and ties them as for any file.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_offload.errors import ConfigError

_OWN_BYTES = 1 << 20
"""Tensors of at least this size have pages of their own. Not huge ones: where memory is in pieces, or a virtual
machine's, finding and clearing them took three times as long as all the rest."""
_PIECE_BYTES = 16 << 20
"""Bytes that one call reads."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_OF_WEIGHTS = ("F64", "F32", "F16", "BF16")


class _File:
    """A safetensors file that is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        # Lazy tensors share the file: it is closed with the last of them, whenever transformers lets go of it.
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, start: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``start`` on."""
        done = 0
        while done < len(memory):
            read = os.preadv(self.descriptor, [memory[done : done + _PIECE_BYTES]], start + done)
            if read == 0:
                raise ConfigError(f"{self.path} ended while it was read: somebody writes to it; try again")
            done += read


class LazyTensor:
    """A tensor of a file that is read by ``[...]``, in the form of a lazy tensor of safetensors."""

    def __init__(self, file: _File, start: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._file, self._start, self._shape, self._dtype = file, start, tuple(shape), dtype

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        count = math.prod(self._shape)
        nbytes = count * self._dtype.itemsize
        if nbytes >= _OWN_BYTES:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._file.read(self._start, memoryview(memory))
            tensor = torch.frombuffer(memory, dtype=self._dtype).view(self._shape)
        else:
            tensor = torch.empty(self._shape, dtype=self._dtype)
            if count:
                self._file.read(self._start, tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor if index is ... else tensor[index]


def lazy_tensors(files: Sequence[Path]) -> dict[str, LazyTensor]:
    """Return all tensors of safetensors ``files`` by name; nothing but tables of contents is read yet.

    Raises:
        ConfigError: if a file is damaged or cut short, or holds weights that are no floating-point numbers.
    """
    tensors: dict[str, LazyTensor] = {}
    for path in files:
        tensors.update(_contents(path))
    return tensors


def _contents(path: Path) -> dict[str, LazyTensor]:
    import json

    from safetensors import SafetensorError, safe_open

    try:
        # The library checks the table: that it is one, and that tensors fill the file exactly.
        with safe_open(path, framework="pt", backend="pread") as checked:
            names = checked.offset_keys()
        file = _File(path)
        # The format: eight bytes with the length of the table, the
        # table, then all tensors; positions are from there on.
        length = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
        table = json.loads(os.pread(file.descriptor, length, 8))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged or cut short ({str(error) or type(error).__name__}); copy or download it again"
        ) from None
    tensors = {}
    for name in names:
        kind, (start, _) = table[name]["dtype"], table[name]["data_offsets"]
        if kind not in _DTYPES or (kind not in _OF_WEIGHTS and name.endswith(".weight")):
            raise ConfigError(
                f"{path}: {name} is of dtype {kind}, not one of {', '.join(_OF_WEIGHTS)}; give the model that this one "
                "was quantized from"
            )
        tensors[name] = LazyTensor(file, 8 + length + start, table[name]["shape"], _DTYPES[kind])
    return tensors
