"""The C library's heap: while the emulated device computes, it keeps memory that has been freed for the next use.

Where the CPU is the device, gradients, activations and logits come from the C library. For what is large (from 128 kB
to 32 MB on, as it adjusts itself) glibc asks the system for pages and gives them back as soon as the tensor dies, so
that every use of the next tensor's pages is a fault in which the system clears them: for a gradient of 100 MB that
takes longer than to compute it. A GPU's memory costs nothing of the kind, and torch's allocator keeps it.

What that means for the process: memory that tensors have taken once stays with it, as free memory of the heap, until
the last device is closed, so that between two steps it takes nearly as much as at the peak. The peak is that of a heap:
somewhat above what lives at one time, as free ranges are not always where the next tensor fits. For tensors of less
than 32 MB glibc does the same on its own. Accounts of device and host memory are not concerned: they count tensors.

Thresholds that are set in the environment (``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) stay as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of ``mallopt``, see ``malloc.h``."""
_NEVER = -1
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")

_keepers: set[object] = set()


def keep_freed_memory() -> Callable[[], None]:
    """Let the heap keep what is freed, however large; return a function that ends it, which may be called again.

    It ends when everybody who has asked for it has ended it. Then free memory goes back to the system. Does nothing
    where there is no glibc, and where the environment says what is to be kept.
    """
    keeper, libc = object(), _glibc()
    chosen = any(name in os.environ for name in _SETTINGS) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if libc is None or chosen:
        return lambda: None
    _keepers.add(keeper)
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)

    def end() -> None:
        # Perhaps by the garbage collector, in the middle of anything: sets change in one step, so no lock is needed.
        if keeper not in _keepers:
            return
        _keepers.discard(keeper)
        if not _keepers:
            # Nobody can ask for the values of before. These are where glibc's own adjustment ends in a process that
            # frees large tensors; it does not go on after a call of ``mallopt``.
            libc.mallopt(_MMAP_MAX, 65536)
            libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
            libc.mallopt(_TRIM_THRESHOLD, 64 << 20)
            give_back()

    return end


def give_back() -> None:
    """Let what the heap keeps as free go back to the system, of every size; nothing happens where there is no glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):  # not Linux, another C library, Windows
        return None
    return libc
