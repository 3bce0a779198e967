"""The loader that training reads: it follows an order and keeps the position in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lt_offload.finetune.data.batches.order import ResumableBatches
from lt_offload.finetune.data.batches.packing import Row
from lt_offload.finetune.data.batches.updates import Sizes, with_tokens


class ResumableLoader(DataLoader[Row]):
    """A loader whose position in the epoch Lightning saves and restores with its checkpoints.

    What counts are the batches that training was given: workers may be ahead of it, and so are the other batches of an
    update of which the tokens are counted.
    """

    def __init__(
        self,
        rows: Dataset[Row],
        *,
        batch_sampler: ResumableBatches,
        collate_fn: Any,
        num_workers: int = 0,
        sizes: Sizes | None = None,
    ) -> None:
        # A generator of its own: making an iterator draws from it, and would change the dropout masks that follow.
        super().__init__(
            rows,
            batch_sampler=batch_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            generator=torch.Generator(),
        )
        self._order = batch_sampler
        self._sizes = sizes

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that workers, too, begin after Lightning has set the epoch.
        for batch in with_tokens(super().__iter__(), self._sizes, lambda batch: batch):
            self._order.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in the training order."""
        self._order.load_state_dict(state)
