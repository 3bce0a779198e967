"""Where a test runs: on a GPU, on the fake one, or on the emulated device.

Knows how to open it and what it used.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any, Literal

import pynvml
import torch

from lt_offload.execute.device.base import Device
from lt_offload.execute.device.cuda import CudaDevice
from tests.support.hostile.device import HostileDevice

Kind = Literal["cuda", "fake", "cpu"]

ROOM = 4 << 30
"""A budget that is not what the test is about."""


@dataclass(frozen=True, kw_only=True)
class Target:
    kind: Kind

    @property
    def cuda(self) -> bool:
        """Whether torch has CUDA devices: streams, an allocator, a driver that may be asked."""
        return self.kind in ("cuda", "fake")

    @property
    def real(self) -> bool:
        """Whether there is hardware: times mean something, and sizes may be a GPU's."""
        return self.kind == "cuda"

    @property
    def accelerator(self) -> str:
        return "cuda" if self.cuda else "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    def open(self, budget: int = ROOM, **emulated: Any) -> Device:
        """Return the device; ``emulated`` are options of the emulated one."""
        if self.cuda:
            return CudaDevice(budget)
        return HostileDevice(budget, **{"mode": "thread", "check": True} | emulated)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def pause(self, seconds: float) -> None:
        """Make the current stream, or the calling thread, take ``seconds`` longer; on the fake all is late anyway."""
        if self.cuda:
            torch.cuda._sleep(int(seconds * CLOCK))
        else:
            time.sleep(seconds)


CLOCK = 1.5e9
"""Cycles per second, roughly, of a GPU."""


def delayed(device: Device, target: Target, seed: int, longest_s: float) -> Device:
    """Make copies, host updates and computations of ``device`` late by random times, and return it."""
    rng = random.Random(seed)
    copy, submit, wait = device.copy, device.submit, device.wait

    def late_copy(to: torch.Tensor, source: torch.Tensor) -> None:
        target.pause(rng.random() * longest_s)
        copy(to, source)

    def late_submit(lane: Any, task: Any, **options: Any) -> Any:
        def late() -> None:
            time.sleep(rng.random() * longest_s)
            task()

        return submit(lane, late if lane == "host" else task, **options)

    def late_wait(*events: Any, **cells: Any) -> None:
        wait(*events, **cells)
        target.pause(rng.random() * longest_s)

    device.copy, device.submit, device.wait = late_copy, late_submit, late_wait  # type: ignore[method-assign]
    return device


def used_by_driver() -> tuple[int, str]:
    """Return the device memory that NVML shows, and whose: this process's, or everybody's where it does not tell."""
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle()):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory), "process"
    return used_by_all(), "everybody (the process is not listed)"


def used_by_all() -> int:
    """Return what everybody has, by NVML: that makes no CUDA context, which would be counted too."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(_handle()).used)


def _handle() -> Any:
    """Return NVML's handle of the first visible GPU."""
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    by_number = visible.isdigit()
    return pynvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(visible)


def memory_now(device: CudaDevice | None = None) -> dict[str, Any]:
    """Return what driver, NVML and torch's allocator say about device memory, and what ``device`` takes it for."""
    free, total = torch.cuda.mem_get_info()
    used, whose = used_by_driver()
    found = {"driver": total - free, "nvml": used, "whose": whose, "nvml_all": used_by_all()}
    found["reserved"] = torch.cuda.memory_reserved()
    return found | ({} if device is None else {"engine": device.memory(), "engine_peak": device.peak_memory()})
