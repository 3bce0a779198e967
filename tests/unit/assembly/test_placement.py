"""Offsets in the arena: first fit of given lifetimes."""

from __future__ import annotations

import numpy as np
import pytest

from lt_offload.plan.assembly.placement import Lifetime, place


def overlaps(ranges: list[tuple[int, int, set[int]]]) -> list[tuple[int, int]]:
    """Return the pairs of (low, high, steps) that share bytes in a common step, the slow way."""
    return [
        (a, b)
        for a, (low, high, steps) in enumerate(ranges)
        for b, (other_low, other_high, other_steps) in enumerate(ranges[:a])
        if low < other_high and other_low < high and steps & other_steps
    ]


def steps_of(life: Lifetime, steps: int) -> set[int]:
    if life.start <= life.end:
        return set(range(life.start, life.end + 1))
    return set(range(life.start, steps)) | set(range(life.end + 1))


@pytest.mark.parametrize("seed", range(20))
def test_random_lifetimes_never_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(2, 30))
    lives = [
        Lifetime(int(rng.choice([1, 512, 513, 4096, rng.integers(1, 10**6)])), *map(int, rng.integers(0, steps, 2)))
        for _ in range(int(rng.integers(1, 80)))
    ]
    found = place(lives, steps)
    ranges = [(at, at + life.bytes, steps_of(life, steps)) for at, life in zip(found.offsets, lives, strict=True)]
    assert overlaps(ranges) == []
    assert all(offset % 512 == 0 for offset in found.offsets)
    assert max(high for _, high, _ in ranges) <= found.extent
    live = [sum(-(-life.bytes // 512) * 512 for life in lives if at in steps_of(life, steps)) for at in range(steps)]
    assert max(live) <= found.extent <= 1.35 * max(live)
