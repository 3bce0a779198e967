"""Compiled code closes and opens the lossless form on the host.

It comes with a wheel, or is compiled when a weight is first closed or opened (:mod:`lt_offload.compiling`), and used
only if it writes the very bits of :mod:`.plain` here. Where it cannot be built the log says why, and ``plain`` does its
work.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from lt_offload.compiling import load
from lt_offload.model.forms.lossless import plain
from lt_offload.model.forms.lossless.plain import ESCAPE, Closed
from lt_offload.optim import native

SOURCE = Path(__file__).with_name("lossless.cpp")


class Library:
    """The compiled code."""

    def __init__(self, file: Path) -> None:
        library = load(file, Path(torch.__file__).parent)  # lets go of the interpreter lock while it runs
        self._functions = {}
        for name, arrays in (("count", 2), ("close", 5), ("escapes", 4), ("open", 6)):
            function = self._functions[name] = getattr(library, f"lt_offload_lossless_{name}")
            function.restype = None
            function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * arrays, ctypes.c_int]

    def close(self, bits: Tensor) -> Closed:
        """Return the pieces of contiguous numbers, as :func:`.plain.close` does."""
        counts = torch.zeros(256, dtype=torch.int64, device="cpu")
        self._run("count", bits, counts)
        exponents = plain.commonest(counts)
        closed = plain.allocate(bits, len(bits), int(counts.sum() - counts[exponents[:ESCAPE].long()].sum()))
        closed.exponents.copy_(exponents)
        per_block = torch.empty_like(closed.starts)
        self._run("close", bits, closed.exponents, closed.mantissas, closed.codes, per_block)
        closed.starts.copy_(plain.starts_of(per_block))
        closed.escapes[-1] = 0  # the only one where there is none
        self._run("escapes", bits, closed.codes, closed.starts, closed.escapes)
        return closed

    def open_(self, closed: Closed, bits: Tensor) -> None:
        """Write the numbers that contiguous pieces hold, as :func:`.plain.open_` does."""
        self._run("open", bits, *closed, last=True)

    def _run(self, name: str, bits: Tensor, *others: Tensor, last: bool = False) -> None:
        arrays = (*others, bits) if last else (bits, *others)
        self._functions[name](len(bits), *(array.data_ptr() for array in arrays), torch.get_num_threads())


@functools.cache
def library() -> Library | None:
    """Return the compiled code, None if there is none on this machine; the log says why, once."""
    slower = "lossless weights are opened slower than they could be: no compiled code, as %s"
    return native.loaded(SOURCE, Library, agrees, slower, "bits are not those of torch's operations")


def agrees(compiled: Library) -> bool:
    """Return whether ``compiled`` closes and opens as :mod:`.plain` does, tried on a sample."""
    bits = plain.sample(torch.device("cpu"))
    mine, right, opened = compiled.close(bits), plain.close(bits), torch.empty_like(bits)
    compiled.open_(right, opened)
    return all(map(torch.equal, mine, right)) and torch.equal(opened, bits)
