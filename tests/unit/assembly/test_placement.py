"""Offsets in the arena: no two buffers overlap, all at once or while an iteration is scheduled."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest

from lt_offload.plan.assembly.placement import Lifetime, place
from lt_offload.plan.assembly.ranges import ArenaRanges, Policy, Reserved


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


POLICIES = get_args(Policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_buffers_never_overlap_and_wait_for_what_was_there(policy: Policy, seed: int) -> None:
    """Against a list of units: which stay has each of them, and when the one before was gone."""
    print(f"seed {seed}")
    generator = random.Random(seed)
    size = generator.randrange(20, 60)
    ranges = ArenaRanges(size, policy)
    taken_until = [-1] * size
    gone_at = [0.0] * size
    live: list[tuple[int, int, int]] = []
    refused = 0
    for step in range(60):
        for low, length, last in live:
            if last == step - 1:
                until = step + generator.random()
                ranges.leave(low, length, until)
                gone_at[low : low + length] = [until] * length
        live = [entry for entry in live if entry[2] >= step]
        ranges.advance(step, 0.0)
        for number in range(generator.randrange(3)):
            length, last = generator.randrange(1, size // 3), step + generator.randrange(6)
            found = ranges.find((number, step), length, step, last)
            free = [taken < step for taken in taken_until]
            if found is None:
                refused += 1
                assert not any(all(free[low : low + length]) for low in range(size - length + 1))
                continue
            low, free_at = found
            assert 0 <= low <= size - length
            assert all(free[low : low + length])
            assert free_at == max(gone_at[low : low + length])
            ranges.take((number, step), low, length, last)
            taken_until[low : low + length] = [last] * length
            gone_at[low : low + length] = [0.0] * length
            live.append((low, length, last))
    assert refused, "the arena was never short"


def test_a_reserved_range_is_free_when_its_stay_has_to_come() -> None:
    ranges = ArenaRanges(10, "lowest")
    ranges.reserve(Reserved((7, 5), 0, 6, wanted=3, needed=5, last=8))
    early = ranges.find((0, 0), 6, 0, 2)
    assert early == (0, 0.0), "gone before"
    assert ranges.find((1, 0), 4, 0, 4) == (6, 0.0), "it would like to come while this is there"
    assert ranges.find((2, 0), 6, 0, 5) is None, "it has to come while this is there"
    assert ranges.find((7, 5), 6, 4, 8) == (0, 0.0)
    ranges.take((3, 4), 2, 3, 4)
    assert ranges.find((7, 5), 6, 4, 8) is None
