"""Rows of the data that are held out for validation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lt_offload.errors import ConfigError

Numbers = NDArray[np.int64]


def held_out(count: int, *, share: float, rows: int | None = None, seed: int | None = None) -> tuple[Numbers, Numbers]:
    """Return the trained and the held-out ones of ``count`` rows, both in the order of the data.

    Args:
        count: rows in all.
        share: of them that is held out; at least one row, unless it is 0.
        rows: number that is held out, instead.
        seed: draws them at random; None: they are the last ones.

    Raises:
        ConfigError: if there are fewer rows than are to be held out.
    """
    few = max(round(count * share), 1 if share else 0) if rows is None else rows
    if few > count:
        raise ConfigError(f"data.validation_rows={rows} is more than the {count} rows there are; lower it")
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return np.sort(order[: count - few]), np.sort(order[count - few :])
