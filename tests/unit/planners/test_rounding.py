from __future__ import annotations

import numpy as np
import pytest

from lt_offload.plan.planners.offmate.rounding import round_options


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
