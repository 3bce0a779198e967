"""Which weights the forward reads in host memory instead of waiting for a copy: the optimum, by dynamic programming.

MemFerry (2024), algorithm 1, decides layer by layer and goes back once.
This is exact: what the layers so far have taken of the computation and of the link is all that later layers depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.planners.memferry.model import Decisions, MemFerryLayer, MemFerryWeight

_Times = NDArray[np.float64]
_Indices = NDArray[np.int64]

BUCKETS = 512
"""Link times that are told apart in chains with more; within one, the state with the earliest computation is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to provide a layer with its weights."""

    compute_s: float
    """What direct reads add to its computation."""
    copy_s: float
    """What it waits for on the link."""
    read_s: float
    """What it takes of the link besides."""
    copied: tuple[bool, ...]


def best_forward(layers: Sequence[MemFerryLayer], *, buckets: int | None = BUCKETS) -> Decisions:
    """Return which weights to copy so that the forward ends first, and of those ways one with the least copying.

    Args:
        layers: the chain.
        buckets: how many states to keep per layer; None: all that could be part of an optimum, which is exact and
            takes seconds for chains of more than 100 different layers.
    """
    time, link = np.zeros(1), np.zeros(1)
    history: list[tuple[_Indices, _Indices]] = []
    found: list[list[Way]] = []
    known: dict[tuple[MemFerryWeight, ...], list[Way]] = {}
    for layer in layers:
        ways = known.get(layer.weights) or known.setdefault(layer.weights, layer_ways(layer.weights))
        copy = np.array([way.copy_s for way in ways])
        taken = np.array([way.copy_s + way.read_s for way in ways])
        compute = np.array([way.compute_s for way in ways]) + layer.forward_s
        waits = np.array([any(way.copied) for way in ways])
        start = np.where(waits, np.maximum(time[:, None], link[:, None] + copy), time[:, None])
        times, links = (start + compute).ravel(), (link[:, None] + taken).ravel()
        kept = undominated(links, times, buckets)
        time, link = times[kept], links[kept]
        history.append((kept // len(ways), kept % len(ways)))
        found.append(ways)
    state = int(np.lexsort((link, time))[0])
    decisions = []
    for (states, chosen), ways in zip(reversed(history), reversed(found), strict=True):
        decisions.append(ways[chosen[state]].copied)
        state = int(states[state])
    return tuple(reversed(decisions))


def layer_ways(weights: Sequence[MemFerryWeight]) -> list[Way]:
    """Return the ways to provide one layer with ``weights`` that no other beats in every respect.

    All of them read directly is kept apart: that alone waits for no copies, not even for those of earlier layers.
    """
    ways = [Way(compute_s=0.0, copy_s=0.0, read_s=0.0, copied=())]
    for weight in weights:
        longer = [
            Way(
                compute_s=way.compute_s + (0.0 if copied else weight.forward_s),
                copy_s=way.copy_s + (weight.transfer_s if copied else 0.0),
                read_s=way.read_s + (0.0 if copied else weight.forward_read_s),
                copied=(*way.copied, copied),
            )
            for way in ways
            for copied in (False, True)
            if copied or weight.forward_s < float("inf")
        ]
        ways = _unbeaten(longer)
    return ways


def undominated(costs: _Times, values: _Times, buckets: int | None) -> _Indices:
    """Return the indices of those (cost, value) of which no other has both less or the same, by ascending cost.

    With ``buckets``, at most about so many: of each part of the range of costs the one with the least value.
    """
    order = np.lexsort((values, costs))
    least = np.minimum.accumulate(values[order])
    order = order[np.concatenate(([True], least[1:] < least[:-1]))]
    if buckets is None or len(order) <= buckets:
        return order
    found = costs[order]
    bucket = ((found - found[0]) * (buckets / (found[-1] - found[0]))).astype(np.int64)
    # Values fall with costs: the last of a bucket is its best. The first of all keeps the least cost possible.
    last = np.concatenate((bucket[1:] > bucket[:-1], [True]))
    last[0] = True
    return order[last]


def _unbeaten(ways: Sequence[Way]) -> list[Way]:
    kept: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.copy_s, way.copy_s + way.read_s, way.compute_s)):
        if not any(way.copied) or not any(_beats(other, way) for other in kept):
            kept.append(way)
    return kept


def _beats(one: Way, other: Way) -> bool:
    """Return whether ``one``, which copies no more, is as good in every respect. Copying nothing waits for less."""
    return one.compute_s <= other.compute_s and one.copy_s + one.read_s <= other.copy_s + other.read_s
