"""The backward of MemFerry (2024): which weights are copied after all, and which gradients are kept on the device.

The paper names the first a greedy algorithm and prints none; the second is its recursion for ``D_{i,j}``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.planners.memferry.forward import undominated
from lt_offload.plan.planners.memferry.model import Decisions, MemFerryLayer, MemFerryWeight, Position, backward

_WORTH = 1e-6
"""Part of the time that one more copy has to save: it is not for nothing, though no time is charged for its launch."""
SIZES = 4096
"""Sums of gradient bytes that are told apart in :func:`kept_gradients`."""


def switched_weights(layers: Sequence[MemFerryLayer], copied: Decisions) -> frozenset[Position]:
    """Return the weights that are read directly in the forward and worth a copy before the backward (DFGB).

    Tried in the order of seconds saved per second of copying, and kept if the backward ends earlier with them. The
    link may be used until a layer's own backward: gradients travel in the other direction. (The paper closes the
    window when they begin to.)
    """
    candidates = [
        (at, index)
        for at, brought in enumerate(copied)
        for index, was_copied in enumerate(brought)
        if not was_copied and layers[at].weights[index].backward_s > 0
    ]
    weight_of = {place: layers[place[0]].weights[place[1]] for place in candidates}
    candidates.sort(key=lambda place: -_rate(weight_of[place]))
    switched: frozenset[Position] = frozenset()
    seconds = backward(layers, copied).compute_s
    for place in candidates:
        attempt = backward(layers, copied, switched | {place}).compute_s
        if attempt < seconds * (1 - _WORTH):
            switched, seconds = switched | {place}, attempt
    return switched


def kept_gradients(weights: Sequence[MemFerryWeight], capacity: int, *, buckets: int | None = SIZES) -> list[bool]:
    """Return for which ``weights`` the gradients are kept on the device, in at most ``capacity`` bytes altogether.

    The others are written to host memory by the backward. What that saves of the backward's time is the most
    possible: a 0/1 knapsack. ``buckets`` limits the sizes that are told apart, see
    :func:`~lt_offload.plan.planners.memferry.forward.undominated`.
    """
    sizes, lost = np.zeros(1), np.zeros(1)
    history: list[tuple[NDArray[np.int64], int] | None] = []
    for weight in weights:
        if weight.gradient_s <= 0:
            history.append(None)
            continue
        grown = np.concatenate((sizes, sizes + weight.gradient_bytes))
        gained = np.concatenate((lost, lost - weight.gradient_s))
        fits = np.flatnonzero(grown <= capacity)
        left = fits[undominated(grown[fits], gained[fits], buckets)]
        history.append((left, len(sizes)))
        sizes, lost = grown[left], gained[left]
    state = int(lost.argmin())
    kept = []
    for entry in reversed(history):
        if entry is None:
            kept.append(False)
            continue
        left, half = entry
        kept.append(bool(left[state] >= half))
        state = int(left[state] % half)
    return kept[::-1]


def _rate(weight: MemFerryWeight) -> float:
    return weight.backward_s / weight.transfer_s if weight.transfer_s > 0 else float("inf")
