"""How fast this machine computes and moves memory: what an estimate of times needs and a measured profile does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from lt_offload.profiling.hardware import measure_hardware
from lt_offload.schema.profile import HardwareProfile

_SIZE = 1024
_COPY_BYTES = 64 << 20
_SECONDS = 0.2


def measure_machine(
    device: torch.device | str | None = None, *, on_progress: Callable[[str], None] | None = None
) -> HardwareProfile:
    """Return ``measure_hardware`` together with the rates of matrix products and of memory."""
    say = on_progress or (lambda _message: None)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = measure_hardware(place, on_progress=say)
    say("measuring matrix products")
    flops = {name: _flops(getattr(torch, name), place) for name in ("float32", "bfloat16")}
    say("measuring memory")
    on_host = _copy_rate(torch.device("cpu"))
    return replace(
        machine,
        flops_per_s=flops,
        device_memory_bytes_per_s=_copy_rate(place) if place.type == "cuda" else on_host,
        host_memory_bytes_per_s=on_host,
    )


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    size = _SIZE if device.type == "cpu" else 4 * _SIZE
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _copy_rate(device: torch.device) -> float:
    """Return bytes read and written per second by a copy within ``device``."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of ``work``, averaged over a fifth of a second, after a warm-up."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    synchronize()
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS:
        work()
        synchronize()
        runs += 1
    return (time.perf_counter() - start) / runs
