"""Batches of rows: their width, the tokens of their update, and loaders that keep their position in an order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.documents import Integers
from lt_offload.finetune.data.batches.order import Batches
from lt_offload.finetune.data.batches.packing import Pack, Row
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.processes import several
from lt_offload.strategy.windows import batches_per_update, knows_tokens
from lt_offload.units import round_up

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


@dataclass(frozen=True, slots=True)
class Collate:
    """Rows as a batch: packed ones as wide as a row can be, others as their longest row, rounded up.

    Packed rows are not masked, so that models find the documents by ``position_ids``, which begin again with each. The
    rest of a row is a document of its own. Other rows are padded on the right, and masked there. Neither has a loss.
    """

    pad_id: int
    length: int
    pack: Pack

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


class ResumableLoader:
    """A loader whose position in the order of batches Lightning saves and restores with its checkpoints.

    The position is that of the batches that training has taken: workers may be ahead of it, and so are the other
    batches of an update of which the tokens are counted. It is no DataLoader, as Lightning would put an order of its
    own into one where there are several processes.

    With the ``sizes`` of updates their tokens are counted. ``length`` is the number of batches that Lightning shall
    take for an epoch of an order that has no end; the next one goes on there.
    """

    def __init__(
        self, order: Batches, *, num_workers: int = 0, sizes: Sizes | None = None, length: int | None = None
    ) -> None:
        # A generator of its own: making an iterator draws from it, and would change the dropout masks that follow.
        self.generator = torch.Generator()
        self.batch_sampler = order
        self._batches: DataLoader[Any] = DataLoader(
            order, batch_size=None, collate_fn=unchanged, num_workers=num_workers, generator=self.generator
        )
        self._sizes = sizes
        self._length = len(order) if length is None else length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers, too, begin after Lightning has set the epoch.
        self.batch_sampler.begin()
        batches = islice(self._batches, self._length)
        for size in self._sizes() if self._sizes is not None else repeat(1, self._length):
            # All batches of an update are made before the first one is given.
            update = list(islice(batches, size))
            tokens = torch.tensor(sum(trained_tokens(batch) for _, batch in update)) if self._sizes else None
            for item in update:
                self.batch_sampler.take(item)
                yield item[1] if tokens is None else item[1] | {TOKENS: tokens}

    @property
    def moved(self) -> int:
        """Difference, in batches, between the position here and the loaded one of another number of processes."""
        if self.batch_sampler.count is None:
            raise AttributeError("an order without an end is not divided into epochs")
        return self.batch_sampler.moved

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in the training order."""
        self.batch_sampler.load_state_dict(state)


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


def check_end(trainer: Any) -> None:
    """Raise ``ConfigError`` if ``trainer`` would never stop: streamed data begin again after their last row."""
    if trainer.max_steps == -1:
        raise ConfigError("data.streaming=true has no end; set trainer.max_steps")


def batches_of(trainer: Any) -> int:
    """Return the number of batches that ``trainer`` takes for all of its steps."""
    # The largest number that a callback will set: too many batches are no matter, as steps end the run, too few are.
    factors = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        factors += getattr(callback, "scheduling", {}).values()
    return int(max(trainer.max_steps, 1) * max(factors))
