"""Arithmetic of a training step: what a token costs, and what the device could do. For the model FLOPs utilisation."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Entries of a model's configuration that say that a token meets only some of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that a device can compute."""

    flops_per_s: float
    source: str
    """Where the number is from, for people."""


def flops_per_token(model: nn.Module) -> float | None:
    """Return the floating point operations that training on one token takes, without attention scores and recomputing.

    Two per weight that is in a product for the forward, two for the gradient of its input, and two for its own gradient
    if it is trained: 6 N where everything is trained. Tables that are looked up only are in no product.

    Returns:
        None for mixtures of experts, where a token meets an unknown part of the weights.
    """
    if any((getattr(getattr(m, "config", None), name, None) or 0) > 1 for m in model.modules() for name in _EXPERTS):
        return None
    users: Counter[int] = Counter()
    tables: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] += 1
            if isinstance(module, nn.Embedding):
                tables.add(id(parameter))
    total = 0.0
    for parameter in model.parameters():
        shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
        if len(shape) < 2 or (id(parameter) in tables and users[id(parameter)] == 1):
            continue
        total += math.prod(shape) * (6 if parameter.requires_grad else 4)
    return total


def peak_of(device: torch.device, precision: str, dtype: torch.dtype, count: int = 1) -> Peak | None:
    """Return the rated peak of ``count`` devices like ``device``; None where it is not known, as for a CPU.

    Args:
        device: where blocks run.
        precision: the Trainer's, e.g. ``bf16-mixed``.
        dtype: of the weights.
        count: of devices that train together.
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
