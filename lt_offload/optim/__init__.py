"""Optimizers for weights that are updated on the host: AdamW with fp32 masters for low-precision weights."""

from __future__ import annotations

from lt_offload.optim.adamw import AdamW

__all__ = ["AdamW"]
