"""The rows of grids that one run of the tests takes: a sample drawn by a seed, or all with ``--full``.

Large grids draw their rows themselves; of all other tests in the folders of ``SHARES`` a part of the rows is run.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
HERE = Path(__file__).parent

SEED = 20240917
FULL = False
"""Both are set by the options ``--sample-seed`` and ``--full`` before any test is collected."""

SHARES = {
    "parity": 3,
    "unit/plan": 2,
    "unit/planners": 2,
    "unit/profiling": 2,
    "unit/strategy": 2,
    "test_recipes.py": 3,
}
"""One row in so many of each test there is run, and at least one; what trains or plans in every row."""
ON_THE_FAKE_GPU = {"gpu": 5, "gpu/engine": 1, "gpu/loops": 10, "gpu/measuring": 1, "gpu/races": 1, "gpu/users": 10}
"""The same there; rows of users and loops are whole runs."""


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


def of_tests(items: list[pytest.Item], shares: Mapping[str, int]) -> list[pytest.Item]:
    """Return ``items`` with some of the rows of every test; the longest path in ``shares`` that holds one counts."""
    rows = defaultdict[tuple[Path, str], list[pytest.Item]](list)
    for item in items:
        rows[item.path, item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for (path, name), mine in rows.items():
        holding = [place for place in shares if path.is_relative_to(HERE / place)]
        share = shares[max(holding, key=len)] if holding else 1
        chosen.update(some(mine, max(1, len(mine) // share), name))
    return [item for item in items if item in chosen]


def half(items: list[pytest.Item], places: Sequence[str]) -> list[pytest.Item]:
    """Return ``items`` with every other test, on average, of those in the folders ``places``."""
    names = {
        item.nodeid.partition("[")[0]
        for item in items
        if any(item.path.is_relative_to(HERE / place) for place in places)
    }
    left_out = names.difference(some(sorted(names), len(names) // 2, "half"))
    return [item for item in items if item.nodeid.partition("[")[0] not in left_out]
