"""A tiny model and its profile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lt_offload
from lt_offload.schema.profile import Profile
from tests.support import models

MIB = 1 << 20


def tiny_model(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build("llama-tied", **options)
    return model, torch.optim.AdamW(model.parameters())


def profiled(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any) -> Profile:
    return lt_offload.profile(model, models.batch(model), optimizer=optimizer, device=device, **options)
