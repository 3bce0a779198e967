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


def test_buffers_that_never_meet_share_a_range() -> None:
    found = place([Lifetime(1000, 0, 1), Lifetime(1024, 2, 3), Lifetime(512, 1, 2)], 4)
    assert found.offsets == (0, 0, 1024)
    assert found.extent == 1536


def test_a_lifetime_may_run_across_the_end() -> None:
    crossing, inside, meeting = Lifetime(512, 3, 0), Lifetime(512, 1, 2), Lifetime(512, 0, 0)
    found = place([crossing, inside, meeting], 4)
    assert found.offsets[0] == found.offsets[1]
    assert found.offsets[0] != found.offsets[2]
    assert found.extent == 1024


def test_what_always_lives_lies_below_the_rest() -> None:
    found = place([Lifetime(600, 0, 0), Lifetime(1, 0, 3), Lifetime(512, 0, 3)], 4)
    assert found.offsets == (1024, 0, 512)
    assert found.extent == 2048


def test_nothing_needs_nothing() -> None:
    assert place([], 4).extent == 0


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
