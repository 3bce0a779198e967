"""Range bookkeeping against a byte-by-byte model."""

import random

import pytest
import torch

from lt_offload.errors import OverBudget
from lt_offload.execute.device.arena import Arena
from lt_offload.execute.device.lanes import Task
from lt_offload.schema.plan import ALIGNMENT

UNIT = ALIGNMENT


def arena(units: int) -> Arena:
    return Arena(torch.zeros(units * UNIT, dtype=torch.uint8))


def pending(label: str) -> Task:
    return Task("h2d", lambda: None, label=label)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 2 * UNIT), (UNIT, 1), (UNIT, 5), (0, 4 * UNIT), (2 * UNIT, UNIT)])
def test_overlap_is_refused_and_names_the_other(offset, nbytes):
    space = arena(4)
    space.place(UNIT, 2 * UNIT, "old")
    with pytest.raises(OverBudget, match=r"new at .* overlaps old at \[512, 1536\)"):
        space.place(offset, nbytes, "new")


def test_neighbours_and_empty_ranges_do_not_overlap():
    space = arena(3)
    middle = space.place(UNIT, UNIT, "middle")
    space.place(0, UNIT, "low")
    space.place(2 * UNIT, UNIT, "high")
    empty = space.place(UNIT, 0, "empty")
    assert empty.view(torch.float32, (0, 3)).shape == (0, 3)
    space.free(empty, [])
    space.free(middle, [])
    assert space.used == 2 * UNIT


def test_a_range_beyond_the_end_is_refused():
    with pytest.raises(OverBudget, match="does not fit"):
        arena(2).place(UNIT, UNIT + 1, "w")


def test_find_returns_the_lowest_aligned_gap():
    space = arena(6)
    space.place(0, UNIT - 100, "a")
    space.place(3 * UNIT, UNIT, "b")
    assert space.find(2 * UNIT, "x") == UNIT
    with pytest.raises(OverBudget, match=r"x needs .*\(1025 bytes\).*largest free range has 1024 bytes"):
        space.find(2 * UNIT + 1, "x")


def test_the_next_user_meets_exactly_the_releases_of_its_range():
    """Random places and frees; for every unit of memory a dictionary says which releases are outstanding."""
    rng = random.Random(7)
    space = arena(32)
    expected: dict[int, str] = {}
    live = []
    for step in range(2000):
        if live and rng.random() < 0.5:
            buffer = live.pop(rng.randrange(len(live)))
            units = range(buffer.offset // UNIT, (buffer.offset + buffer.nbytes) // UNIT)
            space.free(buffer, [pending(f"r{step}")])
            expected.update(dict.fromkeys(units, f"{step}"))
            continue
        start = rng.randrange(32)
        units = range(start, min(32, start + rng.randint(1, 8)))
        taken = {u for b in live for u in range(b.offset // UNIT, (b.offset + b.nbytes) // UNIT)}
        if taken & set(units):
            with pytest.raises(OverBudget):
                space.place(start * UNIT, len(units) * UNIT, "new")
            continue
        buffer = space.place(start * UNIT, len(units) * UNIT, "new")
        wanted = {expected.pop(u) for u in units if u in expected}
        assert {t.label for t in buffer.releases} == {f"r{w}" for w in wanted}
        live.append(buffer)
    assert len(space._freed) <= 32
