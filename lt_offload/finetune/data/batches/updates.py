"""The batches of an update, the first of which has the number of tokens that are trained in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.processes import several
from lt_offload.strategy.windows import batches_per_update, knows_tokens

TOKENS = "num_items_in_batch"
"""Key in a batch, as transformers calls it: tokens that are trained in all batches of its update, in this process."""

Batch = dict[str, Tensor]
Sizes = Callable[[], Iterator[int]]
"""A function that yields the number of batches of each of the next updates; called for an epoch's first batch."""
Item = TypeVar("Item")


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


def with_tokens(items: Iterable[Item], sizes: Sizes | None, batch_of: Callable[[Item], Batch]) -> Iterator[Item]:
    """Yield ``items``, each when all those of its update have been made, and its batch with their tokens.

    Args:
        items: with a batch each.
        sizes: of the updates; None: items are as they are.
        batch_of: returns the batch of an item.
    """
    if sizes is None:
        yield from items
        return
    rest = iter(items)
    for size in sizes():
        update = list(islice(rest, size))
        tokens = torch.tensor(sum(trained_tokens(batch_of(item)) for item in update))
        for item in update:
            batch_of(item)[TOKENS] = tokens
            yield item
