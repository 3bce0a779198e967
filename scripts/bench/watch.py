"""Runs one measured process and watches it: time, memory of its tree, what the machine has left, what the driver says.

Knows processes only. Nothing here touches CUDA: a context of its own would take memory from what is measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lt_offload.profiling.hardware import available_host_bytes

_INTERVAL = 0.1
_TAIL = 4000
"""Bytes of output that are kept of a process that died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a process may take."""

    seconds: float
    host_bytes: int
    """Of RAM, for the process and its children."""
    reserve_bytes: int = 0
    """The process is ended when the machine has less than this left, before the system ends anybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a process."""

    code: int
    ended: str
    """Why it was ended: ``"time limit"``, ``"out of host memory"``; empty if it ended by itself."""
    seconds: float
    host_peak_bytes: int
    device_peak_bytes: int | None
    """By the driver, above what was in use before; None without a driver to ask."""
    tail: str
    """The end of what it printed."""


class DriverMeter:
    """Memory in use on the first visible GPU, as the driver counts it."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        by_name = not visible.isdigit()
        self._handle = (
            pynvml.nvmlDeviceGetHandleByUUID(visible) if by_name else pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        )
        self._last = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def used(self) -> int:
        """Return bytes in use by anybody; as before if the driver does not answer this time."""
        with suppress(self._nvml.NVMLError):
            self._last = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        return self._last


def open_meter() -> Callable[[], int] | None:
    """Return what reads the device memory in use; None where there is no driver that says it."""
    try:
        return DriverMeter().used
    except Exception:  # no package, no driver, or one that does not answer: the allocator's own figure has to do
        return None


def watch(
    command: Sequence[str],
    limits: Limits,
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    meter: Callable[[], int] | None = None,
) -> Outcome:
    """Run ``command`` until it ends or passes a limit; its output goes to the file ``log``."""
    before = meter() if meter is not None else 0
    began = time.monotonic()
    host_peak, device_peak, ended = 0, before, ""
    with log.open("wb") as output:
        # A group of its own, so that it can be ended with its children; the same session, so that it dies with this.
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, process_group=0)
        try:
            while process.poll() is None and not ended:
                host = _tree_bytes(process.pid)
                host_peak = max(host_peak, host)
                if meter is not None:
                    device_peak = max(device_peak, meter())
                if host > limits.host_bytes or available_host_bytes() < limits.reserve_bytes:
                    ended = "out of host memory"
                elif time.monotonic() - began > limits.seconds:
                    ended = "time limit"
                else:
                    time.sleep(_INTERVAL)
        finally:
            _end(process)
    return Outcome(
        code=process.returncode,
        ended=ended,
        seconds=time.monotonic() - began,
        host_peak_bytes=host_peak,
        device_peak_bytes=device_peak - before if meter is not None else None,
        tail=log.read_bytes()[-_TAIL:].decode("utf-8", errors="replace"),
    )


def _tree_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children; memory they share counts for each."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
    except psutil.Error:
        pass
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group; its memory is free when this returns."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
