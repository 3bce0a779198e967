"""Lanes beside each other: linear rows for programs that know nothing of moments.

At every moment the lanes that have work run at the rates of :func:`lt_offload.plan.verify.lanes.rates`. Their work
after a while is a mean of such rates, or less: a polytope, which rows describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import combinations

import numpy as np

from lt_offload.plan.verify.lanes import D2H, H2D, READ, WRITE, rates
from lt_offload.schema.lanes import MACHINE_LANES, LaneName
from lt_offload.schema.profile import Contention

Row = Mapping[LaneName, float]
"""Factors of the seconds of work of lanes, alone; 0 of those that are not named."""

_LANES = len(MACHINE_LANES)
_TOLERANCE = 1e-9


@cache
def sharing_rows(contention: Contention, *, direct: bool) -> tuple[Row, ...]:
    """Return the rows besides "no lane has more than a second's work a second": their sums are at most the time.

    Args:
        contention: what lanes take from each other.
        direct: whether computations may also read and write host memory, which counts as copies do. Without that the
            rows are tighter.
    """
    # All together do not need more than there is, so that no lane ever slows another.
    if sum(contention.of(lane.name) for lane in MACHINE_LANES) <= 1:
        return ()
    rows: list[list[float]] = []
    points = _points(contention, direct=direct)
    # Rows over all lanes first: one over fewer lanes is often part of them, and then left out.
    for count in range(_LANES, 1, -1):
        for lanes in combinations(range(_LANES), count):
            others = [lane for lane in range(_LANES) if lane not in lanes]
            for facet in _facets(points[(points[:, others] == 0).all(axis=1)][:, lanes]):
                row = [0.0] * _LANES
                for lane, factor in zip(lanes, facet, strict=True):
                    row[lane] = float(factor)
                if not any(all(a <= b + _TOLERANCE for a, b in zip(row, other, strict=True)) for other in rows):
                    rows.append(row)
    return tuple({MACHINE_LANES[lane].name: factor for lane, factor in enumerate(row) if factor} for row in rows)


def _points(contention: Contention, *, direct: bool) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    vectors = set()
    working = [*range(_LANES), *((READ, WRITE) if direct else ())]
    for chosen in range(1, 1 << len(working)):
        rate = rates(contention, sum(1 << lane for bit, lane in enumerate(working) if chosen >> bit & 1))
        vector = list(rate[:_LANES])
        vector[H2D] += rate[READ]
        vector[D2H] += rate[WRITE]
        vectors.add(tuple(round(part, 12) for part in vector))
    return np.array(sorted(vectors))


def _facets(
    points: np.ndarray[tuple[int, int], np.dtype[np.float64]],
) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return the factors, all positive, of the planes through as many points as lanes that have no point above them."""
    count = points.shape[1]
    if len(points) < count:
        return []
    chosen = points[np.array(list(combinations(range(len(points)), count)))]
    chosen = chosen[np.abs(np.linalg.det(chosen)) > _TOLERANCE]
    planes = np.linalg.solve(chosen, np.ones((len(chosen), count, 1)))[:, :, 0]
    planes = planes[(planes > _TOLERANCE).all(axis=1)]
    planes = planes[(planes @ points.T <= 1 + _TOLERANCE).all(axis=1)]
    return list(np.unique(planes.round(9), axis=0))
