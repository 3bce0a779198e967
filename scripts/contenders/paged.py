"""bitsandbytes' paged 8-bit AdamW: weights and gradients on the device, states in managed memory that may move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contenders.case import LEARNING_RATE, Batch, Case, Training
from torch import Tensor

MOMENTS = 2
"""Bytes per parameter of both moments, of 8 bits each. One tensor's are fetched while another's are in use."""


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train with optimizer states of 8 bits; the ballast makes them share what the budget leaves.

    Torch's allocator gets so little less that the states of two tensors always have room: on a full device every access
    to managed memory would wait for pages to leave, which says nothing about a card of that size.
    """
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    case.limit(ballast=True, kept_free=2 * MOMENTS * case.workload.largest_tensor)
    model = case.model(case.place)
    case.checkpoint(model)
    kind = PagedAdamW8bit if case.device == "cuda" else AdamW8bit  # there is no memory to page to on a CPU
    optimizer = kind(model.parameters(), lr=LEARNING_RATE)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**case.to_place(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    notes = ["moments of 8 bits: other updates than those of AdamW"]
    if case.device != "cuda":
        notes.append("not paged: that needs a GPU")
    yield Training(step=step, notes=tuple(notes))
