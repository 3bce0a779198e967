"""How lanes slow each other down: shares from measured slowdowns, and the measurement itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lt_offload.profiling.contention import SETS, SHARING, factors, fitted
from lt_offload.schema.profile import Contention, Slowdown


def slowdowns(shares: Sequence[float]) -> list[Slowdown]:
    """What lanes with ``shares`` do to each other."""
    of = dict(zip(SHARING, shares, strict=True))
    found = []
    for lanes in SETS:
        slow = factors(np.array([[of[lane] for lane in lanes]]))[0]
        for lane, factor in zip(lanes, slow, strict=True):
            beside = tuple(other for other in lanes if other != lane)
            found.append(Slowdown(lane=lane, beside=beside, factor=float(factor)))
    return found


def shares(found: Contention) -> list[float]:
    return [found.of(lane) for lane in SHARING]


@pytest.mark.parametrize(
    ("asked", "slow"),
    [
        ([0.4, 0.5], [1.0, 1.0]),
        ([1.0, 1.0], [2.0, 2.0]),
        ([0.9, 0.3], [0.9 / 0.7, 1.0]),
        ([0.2, 0.8, 0.8], [1.0, 2.0, 2.0]),
        ([0.0, 1.0], [1.0, 1.0]),
    ],
)
def test_each_gets_what_it_asks_for_or_an_equal_part(asked: list[float], slow: list[float]) -> None:
    assert factors(np.array([asked]))[0].tolist() == pytest.approx(slow)


@pytest.mark.parametrize(
    "true",
    [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.45, 0.45, 0.9],
        [0.0, 0.62, 0.71, 1.0],
        [0.83, 0.57, 0.64, 0.91],
        [1.0, 0.37, 0.41, 0.78],
    ],
    ids=str,
)
def test_shares_are_found_again(true: list[float]) -> None:
    found = fitted(slowdowns(true))
    assert [s.factor for s in slowdowns(shares(found))] == pytest.approx([s.factor for s in slowdowns(true)], abs=1e-3)
    assert shares(found) == pytest.approx(true, abs=2e-3)
    assert found.slowdowns == tuple(slowdowns(true))


def test_what_nothing_slows_down_shares_nothing() -> None:
    noisy = [
        replace(s, factor=s.factor + 0.03 * (-1) ** number) if "compute" in (s.lane, *s.beside) else s
        for number, s in enumerate(slowdowns([0.0, 0.7, 0.7, 0.9]))
    ]
    assert fitted(noisy).compute == 0.0
    scattered = [replace(s, scatter=0.5) for s in slowdowns([0.0, 0.6, 0.6, 0.0])]
    assert shares(fitted(scattered)) == [0.0] * 4, "it may be chance"
