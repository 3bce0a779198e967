"""MemFerry's chain of layers: the optimum against enumeration, and what the paper's algorithm makes of it."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from lt_offload.plan.papers.memferry.model import (
    CopiedWeights,
    MemFerryLayer,
    MemFerryWeight,
    backward,
    best_forward,
    forward,
    kept_gradients,
    switched_weights,
)


def random_weight(rng: np.random.Generator, *, reads: bool) -> MemFerryWeight:
    transfer = float(rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 10)], p=[0.1, 0.4, 0.5]))
    return MemFerryWeight(
        transfer_s=transfer,
        forward_s=float(rng.choice([rng.uniform(0, 2), rng.uniform(0, 12), np.inf], p=[0.45, 0.45, 0.1])),
        backward_s=float(rng.uniform(0, 2)),
        forward_read_s=transfer * float(rng.uniform(0, 2)) if reads else 0.0,
        backward_read_s=transfer * float(rng.uniform(0, 1)) if reads else 0.0,
        gradient_bytes=int(rng.integers(1, 1000)),
        gradient_transfer_s=transfer,
        gradient_s=float(rng.uniform(0, 2)),
    )


def random_layers(
    rng: np.random.Generator, most: int, *, reads: bool = False, weights: int | None = 1
) -> list[MemFerryLayer]:
    """``weights``: how many each layer has; None: none to three."""
    return [
        MemFerryLayer(
            forward_s=float(rng.uniform(0.1, 3)),
            backward_s=float(rng.uniform(0.2, 6)),
            weights=tuple(
                random_weight(rng, reads=reads) for _ in range(int(rng.integers(0, 4)) if weights is None else weights)
            ),
        )
        for _ in range(int(rng.integers(1, most + 1)))
    ]


def all_decisions(layers: list[MemFerryLayer]) -> list[CopiedWeights]:
    decisions = [
        list(product(*[(True,) if w.forward_s == float("inf") else (False, True) for w in layer.weights]))
        for layer in layers
    ]
    return list(product(*decisions))


def seconds(layers: list[MemFerryLayer], copied: CopiedWeights) -> float:
    """Event by event, not by :func:`forward`: when the computations of all layers have ended."""
    queue = [
        (at, weight.transfer_s if is_copied else weight.forward_read_s, is_copied)
        for at, (layer, brought) in enumerate(zip(layers, copied, strict=True))
        for is_copied in (True, False)  # a layer's copies go before its reads
        for weight, one in zip(layer.weights, brought, strict=True)
        if one == is_copied
    ]
    arrived: dict[int, float] = {}
    clock = 0.0
    for at, occupied, is_copy in queue:
        clock += occupied
        if is_copy:
            arrived[at] = clock
    time = 0.0
    for at, (layer, brought) in enumerate(zip(layers, copied, strict=True)):
        longer = sum(w.forward_s for w, one in zip(layer.weights, brought, strict=True) if not one)
        time = max(time, arrived.get(at, 0.0)) + layer.forward_s + longer
    return time


@pytest.mark.parametrize("reads", [False, True], ids=["reads are free", "reads take the link"])
def test_the_program_equals_enumeration(reads: bool) -> None:
    rng = np.random.default_rng(1)
    for case in range(150):
        layers = random_layers(rng, 9, reads=reads)
        found = forward(layers, best_forward(layers, buckets=None)).seconds
        assert found == pytest.approx(min(seconds(layers, copied) for copied in all_decisions(layers))), case


def test_buckets_cost_next_to_nothing_in_long_chains() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        layers = [random_layers(rng, 1, reads=True, weights=2)[0] for _ in range(120)]
        exact = forward(layers, best_forward(layers, buckets=None)).seconds
        quick = forward(layers, best_forward(layers, buckets=128)).seconds
        assert exact <= quick + 1e-9
        assert quick <= 1.01 * exact


def test_switched_weights_are_near_the_best_choice_and_never_harm() -> None:
    rng = np.random.default_rng(5)
    ratios, gains = [], []
    for _ in range(80):
        layers = random_layers(rng, 10, reads=True)
        copied = best_forward(layers)
        places = [(at, 0) for at, (was_copied,) in enumerate(copied) if not was_copied]
        best = min(
            backward(layers, copied, set(chosen)).compute_s
            for count in range(len(places) + 1)
            for chosen in combinations(places, count)
        )
        switched = switched_weights(layers, copied)
        found, without = backward(layers, copied, switched).compute_s, backward(layers, copied).compute_s
        assert switched <= set(places)
        assert best - 1e-9 <= found <= without + 1e-9
        ratios.append(found / best)
        gains.append(without / found)
    assert max(ratios) < 1.02
    assert np.mean(gains) > 1.005


def test_kept_gradients_are_the_best_choice_and_more_reserve_never_hurts() -> None:
    rng = np.random.default_rng(6)
    for _ in range(100):
        weights = [random_weight(rng, reads=False) for _ in range(int(rng.integers(0, 9)))]
        total = sum(weight.gradient_bytes for weight in weights)
        before = 0.0
        for reserve in (0.0, 0.2, 0.5, 0.7, 1.0):
            capacity = int(reserve * total)
            kept = kept_gradients(weights, capacity)
            assert sum(w.gradient_bytes for w, keep in zip(weights, kept, strict=True) if keep) <= capacity
            gain = sum(w.gradient_s for w, keep in zip(weights, kept, strict=True) if keep)
            best = max(
                sum(w.gradient_s for w in chosen)
                for count in range(len(weights) + 1)
                for chosen in combinations(weights, count)
                if sum(w.gradient_bytes for w in chosen) <= capacity
            )
            assert gain == pytest.approx(best)
            assert gain >= before - 1e-9
            before = gain
        assert kept_gradients(weights, total) == [True] * len(weights)
