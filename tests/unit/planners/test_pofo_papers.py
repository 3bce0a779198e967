"""The chains and comparisons behind the tables of POFO."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from lt_offload.plan.papers.pofo.chain import Chain
from scripts.papers import pofo_networks as networks
from scripts.papers.pofo import memory_range, times


@pytest.mark.parametrize(
    ("chain", "layers", "last_channels", "side", "multiplications"),
    [
        (networks.resnet(), 1 + 33, 2048, 16, 7.8e9 * (500 / 224) ** 2),
        (networks.densenet(), 1 + 58 + 3, 1024, 15, 2.9e9 * (500 / 224) ** 2),
        (networks.inception(), 5 + 11, 2048, 16, 5.7e9 * (500 / 299) ** 2),
    ],
)
def test_networks_have_the_published_shapes(
    chain: Chain, layers: int, last_channels: int, side: int, multiplications: float
) -> None:
    assert len(chain.layers) == layers
    assert chain.layers[-1].output_bytes == networks.tensor_bytes((last_channels, side))
    arithmetic = 2 * networks.BATCH * multiplications / networks.FLOPS_PER_S
    forward = sum(layer.forward_s for layer in chain.layers)
    # The rest is memory traffic, which dominates where the convolutions are thin.
    assert 0.9 * arithmetic < forward < 4 * arithmetic


@pytest.mark.slow
def test_the_algorithms_stand_in_the_order_of_the_paper() -> None:
    chain = networks.synthetic(10)
    low, high = memory_range(chain)
    assert low < high
    found = times(chain, 0.2)
    assert 1 <= found["pofo"] < min(found["rematerialisation"], found["offload-only"], found["opportunist"])
    assert found["autocapper"] <= found["rematerialisation"] * 1.01
    faster = times(replace(chain, bytes_per_s=20 * chain.bytes_per_s), 0.2)
    assert faster["offload-only"] == pytest.approx(1.0, abs=0.01)
    assert faster["rematerialisation"] == pytest.approx(found["rematerialisation"])
    assert all(ratio < inf for ratio in times(chain, 1.0).values())
