"""Tiny models with layers of four bits under adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lt_offload.finetune.module import LoraArgs, add_lora
from lt_offload.finetune.quantize import quantized
from tests.support import models

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Rows of whole blocks."""


def base(*, dtype: torch.dtype = torch.float32, family: str = "llama", **settings: Any) -> nn.Module:
    """Return a model of four bits in training mode, in which all but the layers are trained."""
    torch.manual_seed(0)
    sizes = SIZES if family != "bloom" else {"hidden_size": 64}
    return quantized(models.build(family, **{"layers": 2} | sizes | settings), dtype)


def adapted(*, lora_dropout: float = 0.0, **settings: Any) -> nn.Module:
    """Return :func:`base` with adapters that change something from the start."""
    model = base(**settings)
    torch.manual_seed(1)
    model = add_lora(model, LoraArgs(r=4, alpha=8, dropout=lora_dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero otherwise, and lora_A would have no gradient
            nn.init.normal_(parameter, std=0.02)
    return model
