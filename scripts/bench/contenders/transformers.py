"""Activation checkpointing of transformers with its offload: layers' inputs in RAM, all else on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripts.bench.contenders.case import Case, Training, Unsupported


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train as under ``TrainingArguments(gradient_checkpointing_kwargs={"offload": True})``.

    Raises:
        Unsupported: on the emulated device: the inputs go to page-locked memory, which torch has beside a GPU only.
    """
    if case.device != "cuda":
        raise Unsupported("not run here: needs a GPU; activations go to page-locked memory, which is not there without")
    case.limit()
    model: Any = case.model(case.place)
    enable = "activation_checkpointing_enable"  # as newer versions call it
    getattr(model, enable if hasattr(model, enable) else "gradient_checkpointing_enable")(offload=True)
    step = case.plain_step(model, case.optimizer(model.parameters()))
    yield Training(step=step, notes=("weights, gradients and states of the optimizer stay on the device",))
