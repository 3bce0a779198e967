"""MemFerry (2024) on paper: a chain of layers whose weights are copied to the device or read in host memory.

The paper's layers have one tensor; here a layer has any number, each copied or read directly. Copies to the device use
one link, first come first served, in the order in which the computations need them. Direct reads cross it as well,
which the paper leaves out: with ``read_s`` of zero it is as there.

Which weights the forward reads directly is an optimum by dynamic programming; algorithm 1 of the paper decides layer by
layer and goes back once. Some of those are copied for the backward after all: the paper speaks of a greedy algorithm
and prints none; which gradients stay on the device is its recursion for ``D_{i,j}``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CopiedWeights = tuple[tuple[bool, ...], ...]
"""Per layer, one decision per weight."""
Position = tuple[int, int]
"""Layer, weight."""
_Times = NDArray[np.float64]
_Indices = NDArray[np.int64]
BUCKETS = 512
"""Link times that are told apart in chains with more; within one, the state with the earliest computation is kept."""
_WORTH = 1e-6
"""Part of the time that one more copy has to save: it is not for nothing, though no time is charged for its launch."""
SIZES = 4096
"""Sums of gradient bytes that are told apart in :func:`kept_gradients`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemFerryWeight:
    """One tensor; seconds are what it adds to the computation of its layer, on the device."""

    transfer_s: float
    """To copy it to the device; ``T_trans``."""
    forward_s: float
    """Seconds that the forward takes longer if it is read directly, ``T_FP^H - T_FP``; infinite: it must be copied."""
    backward_s: float = 0.0
    """Seconds that the backward takes longer if it is read directly, ``T_BP^H - T_BP``."""
    forward_read_s: float = 0.0
    """Seconds of the link that a direct read takes in the forward."""
    backward_read_s: float = 0.0
    """The same in the backward."""
    gradient_bytes: int = 0
    gradient_s: float = 0.0
    """Seconds that the backward takes longer if it writes the gradient to host memory itself, ``T_GBP - T_CBP``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemFerryLayer:
    """A computation that needs its weights; without any, one like the paper's ``A_{l,l+1}``."""

    forward_s: float
    backward_s: float = 0.0
    weights: tuple[MemFerryWeight, ...] = ()


class Forward(NamedTuple):
    """Ends of the computations and copies of the forward, from its first moment on."""

    ends: tuple[float, ...]
    """Per layer."""
    link_s: float
    """The moment from which on the link to the device is free."""

    @property
    def seconds(self) -> float:
        """The moment in which the last layer ends."""
        return self.ends[-1] if self.ends else 0.0


def forward(layers: Sequence[MemFerryLayer], copied: CopiedWeights) -> Forward:
    """Run the forward: a layer starts when the one before has ended and its ``copied`` weights have arrived.

    Direct reads take their time on the link before any copy for a later layer.
    """
    time = link = 0.0
    ends = []
    for layer, brought in zip(layers, copied, strict=True):
        seconds, reads = layer.forward_s, 0.0
        for weight, is_copied in zip(layer.weights, brought, strict=True):
            if is_copied:
                link += weight.transfer_s
            else:
                seconds += weight.forward_s
                reads += weight.forward_read_s
        time = (max(time, link) if any(brought) else time) + seconds
        ends.append(time)
        link += reads
    return Forward(tuple(ends), link)


def backward_end(layers: Sequence[MemFerryLayer], copied: CopiedWeights, switched: Collection[Position] = ()) -> float:
    """Return the end of the backward's computations, from the first moment of the forward on.

    Args:
        layers: the chain.
        copied: the weights that were copied before the forward and are still there (GFGB).
        switched: weights read directly in the forward and copied after it (DFGB), the deepest first and none before
            its own forward has ended; their backwards wait for them.
    """
    before = forward(layers, copied)
    time, link = before.seconds, before.link_s
    for at in reversed(range(len(layers))):
        seconds, reads = layers[at].backward_s, 0.0
        for index, (weight, was_copied) in enumerate(zip(layers[at].weights, copied[at], strict=True)):
            if (at, index) in switched:
                # The copy waits for the end of the layer's own forward, which reads the weight in host memory.
                link = max(link, before.ends[at]) + weight.transfer_s
                time = max(time, link)
            elif not was_copied:
                seconds += weight.backward_s
                reads += weight.backward_read_s
        time += seconds
        link += reads
    return time


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to provide a layer with its weights."""

    compute_s: float
    """Seconds that direct reads add to its computation."""
    copy_s: float
    """Seconds on the link for which it waits."""
    read_s: float
    """Seconds that it takes of the link besides."""
    copied: tuple[bool, ...]


def best_forward(layers: Sequence[MemFerryLayer], *, buckets: int | None = BUCKETS) -> CopiedWeights:
    """Return which weights to copy so that the forward ends first, and of those ways one with the least copying.

    Args:
        layers: the chain.
        buckets: how many states to keep per layer; None: all that could be part of an optimum, which is exact and
            takes seconds for chains of more than 100 different layers.
    """
    time, link = np.zeros(1), np.zeros(1)
    history: list[tuple[_Indices, _Indices]] = []
    of_layers: list[list[Way]] = []
    # Layers of a transformer have the same weights: their ways are worked out once.
    known: dict[tuple[MemFerryWeight, ...], list[Way]] = {}
    for layer in layers:
        ways = known.get(layer.weights) or known.setdefault(layer.weights, layer_ways(layer.weights))
        copy = np.array([way.copy_s for way in ways])
        taken = np.array([way.copy_s + way.read_s for way in ways])
        compute = np.array([way.compute_s for way in ways]) + layer.forward_s
        waits = np.array([any(way.copied) for way in ways])
        # Every kept state of the layers before with every way of this one, as rows and columns.
        start = np.where(waits, np.maximum(time[:, None], link[:, None] + copy), time[:, None])
        times, links = (start + compute).ravel(), (link[:, None] + taken).ravel()
        kept = undominated(links, times, buckets)
        time, link = times[kept], links[kept]
        # Which state and which way each new state came from; decisions are read off backwards.
        history.append((kept // len(ways), kept % len(ways)))
        of_layers.append(ways)
    # lexsort sorts by its last key first: by time, and by the link among equals.
    state = int(np.lexsort((link, time))[0])
    decisions = []
    for (states, chosen), ways in zip(reversed(history), reversed(of_layers), strict=True):
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
    kept = costs[order]
    bucket = ((kept - kept[0]) * (buckets / (kept[-1] - kept[0]))).astype(np.int64)
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


def switched_weights(layers: Sequence[MemFerryLayer], copied: CopiedWeights) -> frozenset[Position]:
    """Return the weights that are read directly in the forward and worth a copy before the backward (DFGB).

    Tried in the order of seconds saved per second of copying, and kept if the backward ends earlier with them. The
    link may be used until a layer's own backward: gradients travel in the other direction. (The paper ends
    this when they begin to.)
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
    seconds = backward_end(layers, copied)
    for place in candidates:
        # Greedy, each kept only if the whole backward ends earlier: a copy may hold up one that is needed sooner.
        attempt = backward_end(layers, copied, switched | {place})
        if attempt < seconds * (1 - _WORTH):
            switched, seconds = switched | {place}, attempt
    return switched


def kept_gradients(weights: Sequence[MemFerryWeight], capacity: int) -> list[bool]:
    """Return for which ``weights`` the gradients are kept on the device, in at most ``capacity`` bytes altogether.

    The others are written to host memory by the backward. The choice saves the most of the backward's time: a 0/1
    knapsack, with :data:`SIZES` sums told apart.
    """
    sizes, lost = np.zeros(1), np.zeros(1)
    history: list[tuple[NDArray[np.int64], int] | None] = []
    for weight in weights:
        if weight.gradient_s <= 0:
            history.append(None)
            continue
        # The second half are the first with this gradient kept: its index says which state each came from.
        grown = np.concatenate((sizes, sizes + weight.gradient_bytes))
        gained = np.concatenate((lost, lost - weight.gradient_s))
        fits = np.flatnonzero(grown <= capacity)
        left = fits[undominated(grown[fits], gained[fits], SIZES)]
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
