"""A storage form: how the numbers of a frozen matrix are kept as bytes, and how a computation opens them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lt_offload.compat.torch import DisableTorchDispatch, beside_fake, is_fake

Pieces = tuple[Tensor, ...]
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each piece."""


class StorageForm(ABC):
    """A way to store a matrix as several tensors, its pieces.

    Pieces are integers and bytes: a cast of a module to another floating-point dtype does not change them. A matrix has
    a row per output of its product.
    """

    name: ClassVar[str]
    """The value of ``model.quantize``."""
    suffixes: ClassVar[tuple[str, ...]]
    """Ends of the names of all pieces but the first, which has the name of the weight."""
    needs: ClassVar[str] = ""
    """The package that closing and opening need."""

    @abstractmethod
    def close(self, weight: Tensor) -> Pieces:
        """Return the pieces of a matrix of floating-point numbers."""

    @abstractmethod
    def open(self, pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the matrix of ``shape`` that ``pieces`` stand for, with numbers of ``dtype``."""

    @abstractmethod
    def layout(self, shape: Sequence[int]) -> Layout:
        """Return what the pieces of a matrix of ``shape`` are like.

        The first has another shape than the matrix. Else libraries would load its bytes into a plain weight of the same
        name, or numbers into it, with a warning at most about the names of the other pieces.
        """

    def refuses(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Return why a matrix of ``shape`` with numbers of ``dtype`` stays as it is; empty if it need not."""
        return ""

    def stack(self, matrices: Sequence[Pieces]) -> Pieces:
        """Return the pieces of several matrices as one, with a dimension more, the first."""
        return tuple(torch.stack(pieces) for pieces in zip(*matrices, strict=True))

    def bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of all pieces of a matrix of ``shape``, which had numbers of ``dtype``."""
        return sum(torch.Size(size).numel() * kind.itemsize for size, kind in self.layout(shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor``; of its last dimension there are as many more."""
    return tensor.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Constant:
    """A small table that opening reads, on the device of what is opened; each is made once.

    Making it is no operation of the block that opens a weight: no account of memory and no count of work has it.
    """

    make: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def beside(self, tensor: Tensor) -> Tensor:
        """Return the table on the device of ``tensor``."""
        if is_fake(tensor):
            return beside_fake(tensor, self.shape, self.dtype)
        key = self, tensor.device
        if key not in _tables:
            with DisableTorchDispatch(), torch.inference_mode(False):
                _tables[key] = self.make().to(tensor.device)
        return _tables[key]


_tables: dict[tuple[Constant, torch.device], Tensor] = {}
