"""Compiled code closes and opens the lossless form on the host.

It is compiled as :mod:`lt_offload.optim.native` compiles, when a weight is first closed or opened, and used only if it
writes the very bits of :mod:`.plain` here. Where it cannot be built the log says why, and ``plain`` does its work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from lt_offload.model.forms.lossless import plain
from lt_offload.model.forms.lossless.plain import ESCAPE, Closed
from lt_offload.optim import native

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("lossless.cpp")


class Library:
    """The compiled code."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))  # lets go of the interpreter lock while it runs
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
    try:
        compiled = Library(native.build(source=SOURCE))
    except (OSError, subprocess.SubprocessError) as error:
        lines = [line for line in (getattr(error, "stderr", None) or "").splitlines() if "error" in line]
        reason = lines[0].strip() if lines else str(error)
    else:
        if agrees(compiled):
            return compiled
        reason = "its bits are not those of torch's operations on this processor"
    _log.warning("lossless weights are opened slower than they could be: no compiled code, as %s", reason)
    return None


def agrees(compiled: Library) -> bool:
    """Return whether ``compiled`` closes and opens as :mod:`.plain` does, tried on a sample."""
    bits = plain.sample(torch.device("cpu"))
    mine, right, opened = compiled.close(bits), plain.close(bits), torch.empty_like(bits)
    compiled.open_(right, opened)
    return all(map(torch.equal, mine, right)) and torch.equal(opened, bits)
