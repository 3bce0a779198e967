"""Memory that the driver page-locks: how much, found by trying, and what a user can do about it.

Where nothing limits it, a driver locks what there is; one small trial shows that it locks at all. Two limits are known:
the process's own (``ulimit -l``), which most drivers do not heed, and that of WSL2, which lies anywhere from 1 GB to
half of the memory and is found by locking more and more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lt_offload.machine.pages import map_pages
from lt_offload.units import format_bytes

_TRIAL_BYTES = 64 << 20
_STEP_BYTES = 256 << 20
_MOST_BYTES = 4 << 30
_MOST_SECONDS = 2.0
_VERSION = Path("/proc/version")

Register = Callable[[int, int], int]
Unregister = Callable[[int], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PinLimit:
    """Amount of memory that may be page-locked."""

    nbytes: int
    how: str
    """Reason for this figure, for people."""


def find_pin_limit(register: Register, unregister: Unregister, *, host_bytes: int) -> PinLimit:
    """Return how much of ``host_bytes`` may be page-locked; takes 64 MiB for a moment, in WSL2 up to 4 GiB."""
    find = _by_growing if is_wsl2() else _by_limit
    with _PinTrial(register, unregister) as trial:
        return find(trial, host_bytes)


def memlock_bytes() -> int | None:
    """Return how much memory this process may lock by itself, as ``ulimit -l`` says; None: as much as it likes."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def is_wsl2(version: Path | None = None) -> bool:
    """Return whether this is Linux within Windows."""
    try:
        return "microsoft" in (version or _VERSION).read_text(encoding="utf-8").lower()
    except OSError:
        return False


def advice() -> str:
    """Return what a user can do so that more memory can be page-locked."""
    if is_wsl2():
        return (
            "WSL2 lets a GPU lock no more than about half of its memory, often only 1 GB: raise `memory` in "
            ".wslconfig, keep Windows and the driver up to date, or use Linux itself"
        )
    limit = memlock_bytes()
    if limit is not None:
        return (
            f"this process may lock {format_bytes(limit)}: try `ulimit -l unlimited`, in Docker `--ulimit memlock=-1`"
        )
    return "there is no limit on locked memory for this process: free some RAM, and see what `dmesg` says"


class _PinTrial(ExitStack):
    """Holds memory that was locked to see whether it can be."""

    nbytes = 0

    def __init__(self, register: Register, unregister: Unregister) -> None:
        super().__init__()
        self._register, self._unregister = register, unregister

    def lock(self, nbytes: int) -> bool:
        pages = map_pages(nbytes)
        if self._register(pages.address, pages.nbytes) != 0:
            return False
        self.callback(lambda: self._unregister(pages.address))  # which keeps the pages until then
        self.nbytes += pages.nbytes
        return True


def _by_limit(trial: _PinTrial, host_bytes: int) -> PinLimit:
    wanted = max(1, min(_TRIAL_BYTES, host_bytes // 2))
    limit = memlock_bytes()
    # Whether a limit counts shows only beyond it. It may be higher than what can be tried, so it is lowered for a
    # moment.
    with _memlock_lowered(wanted // 2):
        locked = trial.lock(wanted)
    if locked:
        heeded = "no limit" if limit is None else f"the limit of {format_bytes(limit)} (`ulimit -l`) does not count"
        return PinLimit(nbytes=host_bytes, how=f"{heeded}: {format_bytes(trial.nbytes)} were locked")
    if limit is not None and limit > 1 and trial.lock(min(wanted, limit // 2)):
        return PinLimit(nbytes=min(host_bytes, limit), how=f"the limit of {format_bytes(limit)} (`ulimit -l`) counts")
    return PinLimit(nbytes=0, how=f"{format_bytes(wanted)} could not be locked")


def _by_growing(trial: _PinTrial, host_bytes: int) -> PinLimit:
    most = min(_MOST_BYTES, host_bytes // 2)
    start, step = time.perf_counter(), min(_STEP_BYTES, most)
    while trial.nbytes + step <= most and time.perf_counter() - start < _MOST_SECONDS:
        if not trial.lock(step):
            step //= 2
            if step < _STEP_BYTES // 4:
                return PinLimit(nbytes=trial.nbytes, how="WSL2 refused more")
    return PinLimit(
        nbytes=max(trial.nbytes, host_bytes // 2),
        how=f"half of the RAM, as is usual in WSL2; {format_bytes(trial.nbytes)} were locked without a refusal",
    )


@contextmanager
def _memlock_lowered(nbytes: int) -> Iterator[None]:
    """Let this process lock no more than ``nbytes`` by itself within the context."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft <= nbytes:
        yield
        return
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
