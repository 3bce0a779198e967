"""The engine that carries out a plan. It never decides and never solves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lt_offload.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from lt_offload.execute.device.base import Device


def find_device(accelerator: str) -> torch.device:
    """Return where blocks run.

    ``accelerator`` is ``"auto"`` (a GPU if there is one), ``"cuda"`` (the current GPU), ``"cuda:1"`` or ``"cpu"`` (the
    emulated device). Raises ``ConfigError`` if there is no such device here.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    automatic = "cuda" if count else "cpu"
    name, colon, number = (automatic if accelerator == "auto" else accelerator).partition(":")
    if name == "cpu" and not colon:
        return torch.device("cpu")
    if name != "cuda" or (colon and not number.isdigit()):
        raise ConfigError(f"accelerator={accelerator!r} is not known; 'auto', 'cuda', 'cuda:1' and 'cpu' are")
    if count == 0:
        raise ConfigError(
            f"accelerator={accelerator!r}: torch finds no GPU here; accelerator='cpu' carries the same plan out on the "
            "emulated device"
        )
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise ConfigError(
            f"accelerator={accelerator!r}: torch finds {count} GPU{'s' * (count > 1)}, the first is cuda:0"
        )
    return torch.device("cuda", index)


def open_device(budget: int, accelerator: str = "auto", *, host_threads: int | None = None, context: int = 0) -> Device:
    """Return the device to run blocks on: a CUDA GPU where there is one, else the emulated device.

    ``budget``: bytes of device memory that may be used. ``host_threads``: of those that the machine has, as many may be
    used by an update on the host; None: as many as torch uses, beside a GPU less those that it needs. ``context``:
    bytes that were planned for the context and for workspaces; 0: not known. Raises ``ConfigError`` if there is no such
    device, and ``OverBudget`` if the device has less than ``budget``.
    """
    place = find_device(accelerator)
    if host_threads is not None:  # a plan may be for a machine with more cores
        host_threads = min(host_threads, os.cpu_count() or host_threads)
    if place.type == "cuda":
        from lt_offload.execute.device.cuda import CudaDevice

        return CudaDevice(budget, place.index, host_threads=host_threads, context=context)
    from lt_offload.execute.device.emulated import EmulatedDevice

    return EmulatedDevice(budget, host_threads=host_threads)
