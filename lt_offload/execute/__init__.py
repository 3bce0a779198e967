"""Doing what a plan says. Never decides and never solves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_offload.execute.device import Device


def open_device(budget: int, accelerator: str = "auto", *, host_threads: int | None = None) -> Device:
    """Return the device to run blocks on: a CUDA GPU where there is one, else the emulated device.

    Args:
        budget: device memory in bytes that may be used.
        accelerator: ``"cuda"``, ``"cpu"`` (the emulated device) or ``"auto"``.
        host_threads: threads that an update on the host may use; None: as many as torch uses.

    Raises:
        OverBudget: if the device has less than ``budget``.
    """
    import torch

    if accelerator == "cuda" or (accelerator == "auto" and torch.cuda.is_available()):
        from lt_offload.execute.cuda import CudaDevice

        return CudaDevice(budget, host_threads=host_threads)
    from lt_offload.execute.emulated import EmulatedDevice

    return EmulatedDevice(budget, host_threads=host_threads)
