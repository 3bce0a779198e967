"""The rows of a large grid that one run of the tests takes: a sample drawn by a seed, or all with ``--full``."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

SEED = 20240917
FULL = False
"""Both are set by the options ``--sample-seed`` and ``--full`` before any test is collected."""


def some(rows: Sequence[T], count: int, name: str = "") -> list[T]:
    """Return ``count`` of ``rows`` in their order; which ones depends on ``name``, too."""
    if FULL or count >= len(rows):
        return list(rows)
    return [rows[at] for at in sorted(random.Random(f"{SEED}{name}" if name else SEED).sample(range(len(rows)), count))]


def grid(*axes: Iterable[Any], count: int = 0) -> list[tuple[Any, ...]]:
    """Return ``count`` rows of the product of ``axes``, in its order; 0: as many as the longest axis has values.

    Every value of every axis occurs, those of one axis about as often as each other.
    """
    values = [list(axis) for axis in axes]
    whole: list[tuple[int, ...]] = list(itertools.product(*(range(len(axis)) for axis in values)))
    count = count or max(map(len, values))
    if not FULL and count < len(whole):
        left, used, chosen = random.Random(SEED).sample(whole, len(whole)), Counter[tuple[int, int]](), []
        for _ in range(count):
            row = min(left, key=lambda row: sum(used[place] for place in enumerate(row)))
            left.remove(row)
            used.update(enumerate(row))
            chosen.append(row)
        whole = sorted(chosen)
    return [tuple(axis[at] for axis, at in zip(values, row, strict=True)) for row in whole]
