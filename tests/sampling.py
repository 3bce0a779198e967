"""The rows of grids that one run of the tests takes: a sample drawn by a seed, or all with ``--full``.

Large grids draw their rows themselves. Of all other tests a run takes a few rows where they differ in a ``seed`` only,
a part of the rows in the folders of ``SHARES``, a part of each file's tests in those of ``TESTS``, few of the tests
that are marked ``slow`` and none that is ``long``. Rows that are marked ``sampled`` are always taken: nothing else
notices some fault.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
HERE = Path(__file__).parent

SEED = 20240917
FULL = EVERY_ROW = False
"""All are set by options (``--sample-seed``, ``--full``, ``--every-row``) before any test is collected."""

SHARES = {
    "parity": 8,
    "parity/engine/test_engine.py": 3,
    "parity/test_beside_backward.py": 1,
    "parity/windows/test_norms.py": 1,
    "parity/reruns": 4,
    "parity/reruns/test_transformed_blocks.py": 8,
    "parity/users/test_hooks.py": 4,
    "unit/plan": 3,
    "unit/planners": 3,
    "unit/profiling": 3,
    "unit/strategy": 3,
    "unit/cli/test_bad_input.py": 5,
    "unit/execute/test_leftovers.py": 4,
    "unit/model/forms": 3,
    "unit/optim": 4,
    "docs/test_commands.py": 5,
    "docs/test_snippets.py": 5,
    "test_recipes.py": 8,
}
"""One row in so many of each test there is run, and at least one; what trains, plans or takes long in every row."""
ON_THE_FAKE_GPU = {
    "gpu": 5,
    "gpu/engine": 1,
    "gpu/loops": 10,
    "gpu/measuring": 1,
    "gpu/races": 1,
    "gpu/several": 1,
    "gpu/users": 10,
}
"""The same there; rows of users and loops are whole runs."""
FEW_ON_THE_FAKE_GPU = ON_THE_FAKE_GPU | {"gpu": 8, "gpu/engine": 3, "gpu/measuring": 3}
"""The same with ``--few``."""
TESTS = {
    "parity": 4,
    "parity/test_beside_backward.py": 1,
    "parity/windows/test_norms.py": 1,
    "parity/windows/test_windows.py": 1,
    **dict.fromkeys(("unit/cli", "unit/finetune", "unit/model", "unit/optim"), 2),
    **dict.fromkeys(("unit/plan", "unit/planners", "unit/profiling"), 2),
}
FEW_TESTS = {"gpu/loops": 8, "gpu/users": 8, "gpu/measuring": 4, "gpu/engine": 4}
"""One test in so many of each file there is run, and at least one; and of them on the fake GPU, with ``--few``."""
NOT_WITH_FEW = ("gpu/loops/test_cli.py", "gpu/loops/test_notebooks.py", "gpu/measuring/test_gpu_launch.py")
"""What is left out with ``--few``: whole runs of commands, a notebook and a bench, ten to twenty seconds each."""
SEEDS = 5
"""So many rows are run of those that differ in a parameter ``seed`` only, fewer where there are several kinds."""
SLOW = 5
"""Of the tests of a folder that are marked ``slow`` one in so many is run, and at least one; of that one row."""


def some(rows: Sequence[T], count: int, name: str = "") -> list[T]:
    """Return ``count`` of ``rows`` in their order; which ones depends on ``name``, too."""
    if FULL or count >= len(rows):
        return list(rows)
    return [rows[at] for at in sorted(random.Random(f"{SEED}{name}" if name else SEED).sample(range(len(rows)), count))]


def one(values: Sequence[T]) -> list[T]:
    """Return one of ``values``, which the running test and the seed draw; all with ``--every-row``."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return list(values) if EVERY_ROW or FULL else [random.Random(f"{SEED}{test}").choice(values)]


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


def share_of(path: Path, shares: Mapping[str, int]) -> int:
    """Return what the longest path in ``shares`` that holds ``path`` says."""
    holding = [place for place in shares if path.is_relative_to(HERE / place)]
    return shares[max(holding, key=len)] if holding else 1


def ordinary(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return those of ``items`` that one run takes."""
    chosen = set(of_files(without_slow(of_tests(items, SHARES)), TESTS))
    marks = {item: list(item.iter_markers("sampled")) for item in items}
    return [
        item
        for item in items
        if item in chosen or any(all(part in item.name for part in mark.args) for mark in marks[item])
    ]


def of_tests(items: list[pytest.Item], shares: Mapping[str, int]) -> list[pytest.Item]:
    """Return ``items`` with some of the rows of every test."""
    rows = defaultdict[tuple[Path, str], list[pytest.Item]](list)
    for item in items:
        rows[item.path, item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for (path, name), mine in rows.items():
        few = of_seeds(mine, name)
        chosen.update(some(few, max(1, len(few) // share_of(path, shares)), name))
    return [item for item in items if item in chosen]


def of_seeds(rows: list[pytest.Item], name: str) -> list[pytest.Item]:
    """Return ``rows`` of the test ``name`` with few of those that differ in their ``seed`` only."""
    kinds = defaultdict[object, list[pytest.Item]](list)
    for row in rows:
        places: dict[str, int] = dict(getattr(getattr(row, "callspec", None), "indices", {}))
        if places.pop("seed", None) is None:
            return rows
        kinds[tuple(sorted(places.items()))].append(row)
    chosen = {row for kind in kinds.values() for row in some(kind, max(1, SEEDS // len(kinds)), name)}
    return [row for row in rows if row in chosen]


def without_slow(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return ``items`` with a row of one in ``SLOW`` of each folder's tests that are marked so, and no ``long`` one."""
    if FULL:
        return items
    tests = defaultdict[Path, dict[str, list[pytest.Item]]](lambda: defaultdict(list))
    left_out = {item for item in items if any(item.get_closest_marker(name) for name in ("slow", "long"))}
    for item in items:
        if item in left_out and item.get_closest_marker("long") is None:
            tests[item.path.parent][item.nodeid.partition("[")[0]].append(item)
    for folder, mine in tests.items():
        for name in some(list(mine), max(1, len(mine) // SLOW), folder.name):
            left_out.difference_update(some(mine[name], 1, name))
    return [item for item in items if item not in left_out]


def of_files(items: list[pytest.Item], shares: Mapping[str, int]) -> list[pytest.Item]:
    """Return ``items`` with one in so many of the tests of each file in a folder of ``shares``, and at least one."""
    tests = defaultdict[Path, dict[str, None]](dict)
    for item in items:
        tests[item.path][item.nodeid.partition("[")[0]] = None
    left_out: set[str] = set()
    for path, mine in tests.items():
        count = math.ceil(len(mine) / share_of(path, shares))
        left_out.update(set(mine).difference(some(list(mine), count, path.name)))
    return [item for item in items if item.nodeid.partition("[")[0] not in left_out]
