"""Orders of batches of short documents, in memory or streamed; batches are the first tokens of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lt_offload.finetune.data.batches import Batches, Place
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.sequences import Documents, Row, Sequences, sequences_of

LENGTHS = np.random.default_rng(0).integers(2, 400, 2003)


def rows(count: int) -> Sequences:
    """Return documents of different lengths, each of which begins with its number."""
    documents = (Example(ids=[number] * length, labels=[1] * length) for number, length in enumerate(LENGTHS[:count]))
    return sequences_of(Documents.from_examples(documents), 400, False)


def order(count: int = 11, size: int = 2, *, made: Sequences | None = None, **options: Any) -> Batches:
    """Return an order of ``count`` documents in memory."""
    whole = made or rows(count)

    def stretches(place: Place) -> Iterator[tuple[Place, Sequences]]:
        if place == (0, 0):
            yield (1, 0), whole

    return Batches(stretches=stretches, batch_size=size, count=count, **{"seed": 3, "collate": numbers} | options)


def numbers(batch: Sequence[Row]) -> list[int]:
    """Return the first tokens of rows, below 0 (as ``~token``) without a loss."""
    return [int(ids[0]) if (labels != IGNORED).any() else ~int(ids[0]) for ids, labels, _ in batch]


def taken(batches: Batches, most: int | None = None) -> list[list[int]]:
    """Return the batches of an epoch, or the ``most`` first ones, which have been taken then."""
    made = []
    batches.begin()
    for item in batches:
        if len(made) == most:
            break
        batches.take(item)
        made.append(item[1])
    return made
