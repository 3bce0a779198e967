"""What lanes can do beside each other, as rows; whole options of blocks hold no more than the relaxed ones."""

from __future__ import annotations

import numpy as np
import pytest

from lt_offload.plan.planners.offmate.rounding import round_options
from lt_offload.plan.planners.sharing import Row, sharing_rows
from lt_offload.plan.verify.lanes import D2H, H2D, READ, WRITE, rates
from lt_offload.schema.lanes import MACHINE_LANES
from lt_offload.schema.profile import Contention

ONE_MEMORY = Contention(h2d=0.36, d2h=0.36, host=1.0)


def work(contention: Contention, busy: int) -> tuple[float, ...]:
    """Return the seconds of work that the four lanes do in one second in which the lanes ``busy`` have work."""
    rate = rates(contention, busy)
    return rate[0], rate[H2D] + rate[READ], rate[D2H] + rate[WRITE], rate[3]


def needed(row: Row, done: tuple[float, ...]) -> float:
    return sum(row.get(lane.name, 0.0) * part for lane, part in zip(MACHINE_LANES, done, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_what_the_simulator_can_do_satisfies_all_rows(seed: int) -> None:
    compute, h2d, d2h, host = np.random.default_rng(seed).uniform(0, 1, 4)
    contention = Contention(compute=compute * (seed % 2), h2d=h2d, d2h=d2h, host=host)
    print(f"seed {seed}: {contention}")
    for direct, masks in ((False, 16), (True, 64)):
        rows = sharing_rows(contention, direct=direct)
        assert bool(rows) or sum((contention.compute, h2d, d2h, host)) <= 1
        for busy in range(1, masks):
            assert all(needed(row, work(contention, busy)) <= 1 + 1e-6 for row in rows), busy


def test_all_lanes_at_once_are_on_the_surface() -> None:
    """The row of the bandwidth alone would let copies run at full speed beside all updates that are left then."""
    together = work(ONE_MEMORY, 0b1111)
    assert max(needed(row, together) for row in sharing_rows(ONE_MEMORY, direct=False)) == pytest.approx(1)
    greedy = (1.0, 1.0, 1.0, 1 - 0.36 - 0.36)
    assert needed({"h2d": 0.36, "d2h": 0.36, "host": 1.0}, greedy) == pytest.approx(1)
    assert max(needed(row, greedy) for row in sharing_rows(ONE_MEMORY, direct=False)) > 1.05


def test_what_fits_side_by_side_needs_no_row() -> None:
    assert sharing_rows(Contention(), direct=True) == ()
    assert sharing_rows(Contention(compute=0.1, h2d=0.3, d2h=0.2, host=0.4), direct=True) == ()


def prefix(chosen: tuple[int, ...], held: list[list[float]]) -> np.ndarray:
    return np.cumsum([sizes[index] for index, sizes in zip(chosen, held, strict=True)])


@pytest.mark.parametrize("seed", range(200))
def test_no_prefix_holds_more_than_the_relaxed_solution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [int(kind) for kind in rng.integers(0, 3, rng.integers(1, 60))]
    number = [1 + 2 * kind for kind in kinds]
    sharpness = float(rng.choice([0.1, 1.0, 10.0]))
    fractions = [list(rng.dirichlet([sharpness] * n)) for n in number]
    held = [list(rng.uniform(0, 2e9, n) * (rng.random(n) > 0.3)) for n in number]

    chosen = round_options(fractions, held, kinds)

    relaxed = np.cumsum([np.dot(f, h) for f, h in zip(fractions, held, strict=True)])
    assert np.all(prefix(chosen, held) <= relaxed * (1 + 1e-6) + 1e-3)


def test_whole_choices_stay_as_they_are() -> None:
    fractions = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    held = [[5.0, 1.0, 0.0]] * 3
    assert round_options(fractions, held, ["a"] * 3) == (1, 0, 2)


def test_every_stretch_of_equal_blocks_gets_its_share() -> None:
    number = 60
    fractions = [[0.3, 0.5, 0.2]] * number
    held = [[1.25, 0.0, 0.0]] * number
    chosen = np.array(round_options(fractions, held, ["layer"] * number))
    for option, share in enumerate(fractions[0]):
        counts = np.cumsum(chosen == option)
        assert np.all(np.abs(counts - share * np.arange(1, number + 1)) <= 2), (option, chosen)
