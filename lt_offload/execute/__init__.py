"""The engine that carries out a plan. It never decides and never solves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lt_offload.machine.driver import find_device

if TYPE_CHECKING:
    from lt_offload.execute.device.base import Device


def open_device(budget: int, accelerator: str = "auto", *, host_threads: int | None = None, context: int = 0) -> Device:
    """Return the device to run blocks on: a CUDA GPU where there is one, else the emulated device.

    ``budget``: bytes of device memory that may be used. ``host_threads``: of those that the machine has, as many may be
    used by an update on the host; None: as many as torch uses, beside a GPU less those that it needs. ``context``:
    bytes that were planned for the context and for workspaces; 0: not known. Raises ``ConfigError`` if there is no such
    device, and ``OverBudget`` if the device has less than ``budget``.
    """
    place = find_device(accelerator, setting="accelerator")
    if host_threads is not None:  # a plan may be for a machine with more cores
        host_threads = min(host_threads, os.cpu_count() or host_threads)
    if place.type == "cuda":
        from lt_offload.execute.device.cuda import CudaDevice

        return CudaDevice(budget, place.index, host_threads=host_threads, context=context)
    from lt_offload.execute.device.emulated import EmulatedDevice

    return EmulatedDevice(budget, host_threads=host_threads)
