"""Peak speeds of devices, by name. For the model FLOPs utilisation of a run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak speed of a device."""

    flops_per_s: float
    source: str
    """The origin of the number, for people."""


def peak_of(device: torch.device, precision: str, dtype: torch.dtype, count: int = 1) -> Peak | None:
    """Return the rated peak of ``count`` devices like ``device``; None where it is not known, as for a CPU.

    ``precision`` is the Trainer's, e.g. ``bf16-mixed``, and ``dtype`` that of the weights.
    """
    computes: Any = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else dtype
    if device.type != "cuda":
        return None
    with warnings.catch_warnings():  # of cards that Lightning has no figure for
        warnings.simplefilter("ignore")
        flops = get_available_flops(device, computes)
    if flops is None:
        return None
    name = torch.cuda.get_device_name(device)
    source = f"{name}, rated peak of dense {str(computes).removeprefix('torch.')}"
    return Peak(flops_per_s=float(flops) * count, source=source if count == 1 else f"{count} x {source}")
