"""torchao's CPUOffloadOptimizer: weights stay on the device, gradients and optimizer states live in RAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from contenders.case import LEARNING_RATE, Batch, Case, Training, Unsupported
from torch import Tensor


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train with gradients that leave the device as soon as they are complete."""
    from torchao.optim import CPUOffloadOptimizer

    if case.device != "cuda":
        raise Unsupported("torchao's CPUOffloadOptimizer needs a GPU")
    case.limit()
    model = case.model(case.place)
    case.checkpoint(model)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LEARNING_RATE, fused=True
    )

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**case.to_place(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield Training(step=step, notes=("updates of all but the smallest tensors run on the host",))
