"""Plain PyTorch: everything stays on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scripts.bench.contenders.case import Case, Training


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train without any offloading."""
    case.limit()
    model = case.model(case.place)
    yield Training(step=case.plain_step(model, case.optimizer(model.parameters())))
