"""Batches of rows: their width, the tokens of their update, and loaders that keep their position in an order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.order import ResumableBatches, Silenced
from lt_offload.finetune.data.batches.packing import Integers, Pack, Row, Sequences
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.processes import Share, several
from lt_offload.strategy.windows import batches_per_update, knows_tokens
from lt_offload.units import round_up

if TYPE_CHECKING:
    from lt_offload.finetune.data.batches.streaming import StreamedBatches

Batch = dict[str, Tensor]
Sizes = Callable[[], Iterator[int]]
"""A function that yields the number of batches of each of the next updates; called for an epoch's first batch."""

TOKENS = "num_items_in_batch"
"""Key in a batch, as transformers calls it: tokens that are trained in all batches of its update, in this process."""

_PAD_MULTIPLE = 8
"""The divisor of a padded batch's columns: few different shapes, and efficient ones."""


def padded_width(longest: int, most: int) -> int:
    """Return the columns of a padded batch whose longest row has ``longest`` tokens; rows have ``most`` at most."""
    return min(round_up(longest, _PAD_MULTIPLE), most)


class Collate:
    """Rows as a batch: packed ones as wide as a row can be, others as their longest row, rounded up.

    Packed rows are not masked, so that models find the documents by ``position_ids``, which begin again with each. The
    rest of a row is a document of its own. Other rows are padded on the right, and masked there. Neither has a loss.
    """

    def __init__(self, pad_id: int, length: int, pack: Pack) -> None:
        self.pad_id = pad_id
        self.length = length
        self.pack = pack

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch of ``rows``."""
        width = self.length if self.pack else padded_width(max(len(ids) for ids, _, _ in rows), self.length)
        shape = (len(rows), width)
        batch = {"input_ids": torch.full(shape, self.pad_id)}
        if not self.pack:
            batch["attention_mask"] = torch.zeros(shape, dtype=torch.long)
        batch["labels"] = torch.full(shape, IGNORED)
        if self.pack is True:
            batch["position_ids"] = torch.empty(shape, dtype=torch.long)
        for number, (ids, labels, positions) in enumerate(rows):
            end = len(ids)
            batch["input_ids"][number, :end] = ids
            batch["labels"][number, :end] = labels
            if not self.pack:
                batch["attention_mask"][number, :end] = 1
            elif self.pack is True:
                batch["position_ids"][number] = torch.cat([positions, torch.arange(width - end)])
        return batch


def sizes_for(trainer: Any) -> Sizes | None:
    """Return the sizes of updates of ``trainer``, None if the tokens of an update are not needed.

    They are if an update may have several batches, one after the other or in several processes, and the module wants
    their tokens to count alike. An update ends where Lightning ends it: after as many batches of the epoch as are a
    multiple of ``accumulate_grad_batches``, and with the last one.
    """
    if trainer is None or not knows_tokens(trainer) or (batches_per_update(trainer) == 1 and not several(trainer)):
        return None

    def sizes() -> Iterator[int]:
        done, end = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches
        while done < end:
            count = trainer.accumulate_grad_batches
            size = min(count - done % count, end - done)
            yield size
            done += size

    return sizes


def trained_tokens(batch: Batch) -> int:
    """Return the number of tokens with a loss: the first one of a row is never predicted."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _with_tokens(items: Iterable[Any], sizes: Sizes | None) -> Iterator[Any]:
    """Yield ``items``, each when all those of its update have been made, and its batch with their tokens."""
    if sizes is None:
        yield from items
        return
    rest = iter(items)
    for size in sizes():
        update = list(islice(rest, size))
        tokens = torch.tensor(sum(trained_tokens(_batch_of(item)) for item in update))
        for item in update:
            _batch_of(item)[TOKENS] = tokens
            yield item


def _batch_of(item: Any) -> Any:
    """Return the batch of a loader's item, which may have its position, too."""
    return item[1] if isinstance(item, tuple) else item


class ResumableLoader:
    """A loader whose position in the order of batches Lightning saves and restores with its checkpoints.

    The position counts the batches that training has taken: workers may be ahead of it, and so are the other batches of
    an update of which the tokens are counted. It is no DataLoader, as Lightning would put an order of its own into one
    where there are several processes.

    The data set is rows, of which ``batch_sampler`` is the order, or streamed batches, each with its position, that are
    their own order, and of which Lightning shall take ``count`` for an epoch; the next one goes on where it ends. With
    the ``sizes`` of updates their tokens are counted.
    """

    def __init__(
        self,
        dataset: Dataset[Row] | StreamedBatches,
        *,
        batch_sampler: ResumableBatches | None = None,
        collate_fn: Any = None,
        num_workers: int = 0,
        sizes: Sizes | None = None,
        count: int | None = None,
    ) -> None:
        # A generator of its own: making an iterator draws from it, and would change the dropout masks that follow.
        self.generator = torch.Generator()
        # Of an iterable data set Lightning would say that its length may be wrong.
        self.dataset = None if batch_sampler is None else dataset
        self.batch_sampler = batch_sampler
        self._order: Any = dataset if batch_sampler is None else batch_sampler
        made = {"batch_size": None, "collate_fn": unchanged} if batch_sampler is None else {"collate_fn": collate_fn}
        self._batches: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            generator=self.generator,
            **made,
        )
        self._sizes = sizes
        self._count = count

    def __len__(self) -> int:
        return len(self._order) if self._count is None else self._count

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers, too, begin after Lightning has set the epoch.
        for item in _with_tokens(islice(self._batches, self._count), self._sizes):
            self._order.take(item)
            yield _batch_of(item)

    @property
    def moved(self) -> int:
        """Difference, in batches, between the position here and the loaded one of another number of processes."""
        moved: int = self._order.moved
        return moved

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order."""
        state: dict[str, Any] = self._order.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in the training order."""
        self._order.load_state_dict(state)


def unchanged(batch: Any) -> Any:
    """Return ``batch``: the collation of items that are whole already."""
    return batch


def held_out(
    count: int, *, share: float, rows: int | None = None, seed: int | None = None
) -> tuple[Integers, Integers]:
    """Return the trained and the held-out ones of ``count`` rows, both in the order of the data.

    A ``share`` is held out, at least one row unless it is 0, or a number of ``rows``: the last ones, or those that
    ``seed`` draws. Raises ``ConfigError`` if there are fewer.
    """
    few = max(round(count * share), 1 if share else 0) if rows is None else rows
    if few > count:
        raise ConfigError(f"data.validation_rows={rows} is more than the {count} rows there are; lower it")
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return np.sort(order[: count - few]), np.sort(order[count - few :])


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
