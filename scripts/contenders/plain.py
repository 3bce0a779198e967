"""Plain PyTorch: everything stays on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contenders.case import Batch, Case, Training
from torch import Tensor


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train without any offloading."""
    case.limit()
    model = case.model(case.place)
    optimizer = case.optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**case.to_place(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield Training(step=step)
