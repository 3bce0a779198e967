"""The chains and comparisons behind the tables of POFO."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from scripts.papers import pofo_networks as networks
from scripts.papers.pofo import memory_range, times


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
