"""The loaders of rows: the training loader keeps its position in a seeded order; held-out rows come in their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lt_offload.finetune.data.batches.order import ResumableBatches, Silenced
from lt_offload.finetune.data.batches.packing import Row, Sequences
from lt_offload.finetune.data.batches.updates import Sizes, with_tokens
from lt_offload.finetune.processes import Share

Batch = dict[str, Tensor]
Collate = Callable[[Sequence[Row]], Batch]


class ResumableLoader:
    """A loader whose position in the epoch Lightning saves and restores with its checkpoints.

    The position counts the batches that training has taken: workers may be ahead of it, and so are the other batches of
    an update of which the tokens are counted. It is no DataLoader, as Lightning would put an order of its own into one
    where there are several processes.
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
        self.generator = torch.Generator()
        self.dataset = rows
        self.batch_sampler = batch_sampler
        self._batches: DataLoader[Row] = DataLoader(
            rows,
            batch_sampler=batch_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            generator=self.generator,
        )
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers, too, begin after Lightning has set the epoch.
        for batch in with_tokens(iter(self._batches), self._sizes, lambda batch: batch):
            self.batch_sampler.position += 1
            yield batch

    @property
    def moved(self) -> int:
        """Difference, in batches, between the position here and the loaded one of another number of processes."""
        return self.batch_sampler.moved

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in the training order."""
        self.batch_sampler.load_state_dict(state)


def held_out_loader(
    rows: Sequences, *, batch_size: int, collate_fn: Collate, num_workers: int, share: Share
) -> DataLoader[Any]:
    """Return the loader of held-out ``rows``, in their order; each of several processes has its ``share`` of it.

    Processes that evaluate together must all take as many batches, and none may count twice. So whole batches are dealt
    out, filled up by the last one without loss, which has a shape that comes anyway.
    """
    batches = [[*range(begin, min(begin + batch_size, len(rows)))] for begin in range(0, len(rows), batch_size)]
    batches += [[~number for number in batches[-1]]] * (-len(batches) % share.of)
    return DataLoader(
        batches,  # type: ignore[arg-type]  # a list is a data set of its items
        batch_size=None,
        sampler=DistributedSampler(batches, share.of, share.first, shuffle=False),  # type: ignore[arg-type]
        collate_fn=partial(_collated, Silenced(rows), collate_fn),
        num_workers=num_workers,
        generator=torch.Generator(),  # as for training
    )


def _collated(rows: Silenced, collate: Collate, numbers: list[int]) -> Batch:
    return collate([rows[number] for number in numbers])
