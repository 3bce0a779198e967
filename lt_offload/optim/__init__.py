"""Optimizers for weights that are updated on the host. Knows tensors; nothing of models, plans or devices."""

from __future__ import annotations

from lt_offload.optim.adamw import AdamW, adamw_

__all__ = ["AdamW", "adamw_"]
