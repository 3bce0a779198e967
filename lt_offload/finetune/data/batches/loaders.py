"""The loaders of rows: the training loader keeps its position in a seeded order; held-out rows come in their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lt_offload.finetune.data.batches.order import ResumableBatches
from lt_offload.finetune.data.batches.packing import Row, Sequences
from lt_offload.finetune.data.batches.updates import Sizes, with_tokens
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.processes import Share
from lt_offload.units import round_up

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


class EvenBatches(Dataset[Batch]):
    """The batches of ``rows`` in their order, filled up to a multiple of ``processes`` by batches without loss.

    Processes that evaluate together must all take as many batches, and none may count twice.
    """

    def __init__(self, rows: Sequences, batch_size: int, collate: Collate, processes: int) -> None:
        self._rows, self._batch_size, self._collate = rows, batch_size, collate
        self._count = -(-len(rows) // batch_size)
        self._processes = processes

    def __len__(self) -> int:
        return round_up(self._count, self._processes)

    def __getitem__(self, number: int) -> Batch:
        # A batch behind the last one is that one again, which has a shape that comes anyway; its labels go below.
        begin = min(number, self._count - 1) * self._batch_size
        batch = self._collate([self._rows[row] for row in range(begin, min(begin + self._batch_size, len(self._rows)))])
        if number >= self._count:
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        return batch


def held_out_loader(
    rows: Sequences, *, batch_size: int, collate_fn: Collate, num_workers: int, share: Share
) -> DataLoader[Any]:
    """Return the loader of held-out ``rows``, in their order; each of several processes has its ``share`` of it."""
    batches = EvenBatches(rows, batch_size, collate_fn, share.of)
    # Whole batches are dealt out, not rows: dealt row by row, other rows would share a batch than in one process.
    return DataLoader(
        batches,
        batch_size=None,
        sampler=DistributedSampler(batches, share.of, share.first, shuffle=False),
        num_workers=num_workers,
        generator=torch.Generator(),  # as for training
    )
