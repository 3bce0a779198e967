"""The dynamic program of POFO against enumeration and another program, and the order of the paper's algorithms."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest

from lt_offload.plan.papers.pofo.chain import Chain, memory, sequential, walk
from lt_offload.plan.papers.pofo.program import ChainProgram
from tests import sampling
from tests.support.profiles.pofo_brute import fluid_s, from_scratch, random_chain, rematerialised_s, sequences


def bounds(chain: Chain) -> tuple[int, int]:
    """The memory to begin every backward from the input, and to keep everything."""
    low, high = (max(memory(walk(made(chain), chain))) for made in (from_scratch, sequential))
    return low, high


def exact(chain: Chain, memory_bytes: int, **switches: bool) -> ChainProgram:
    """A program whose slots are bytes."""
    return ChainProgram(chain, memory_bytes=memory_bytes, slots=memory_bytes, **switches)


@pytest.mark.parametrize("rate", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(8))
def test_equals_enumeration_with_three_layers(seed: int, rate: float) -> None:
    chain = random_chain(seed, 3, rate=rate)
    low, high = bounds(chain)
    everything = list(sequences(chain))
    for budget in sorted({low - 2, low, (2 * low + high) // 3, (low + high) // 2, high - 1, high}):
        best = min(fluid_s(operations, chain, budget) for operations in everything)
        assert exact(chain, budget).seconds(budget) == pytest.approx(best, rel=1e-4)


def test_mixing_beats_both_ingredients() -> None:
    """Otherwise the comparisons above would prove little."""
    wins = 0
    for seed in range(10):
        chain = random_chain(seed, 5)
        low, high = bounds(chain)
        budget = (low + high) // 2
        mixed, again, travel = (
            exact(chain, budget, offload=offload, recompute=recompute).seconds(budget)
            for offload, recompute in ((True, True), (False, True), (True, False))
        )
        assert mixed <= min(again, travel)
        wins += mixed < min(again, travel)
    assert wins >= 3


@pytest.mark.parametrize("seed", range(6))
def test_without_a_link_equals_an_independent_program(seed: int) -> None:
    chain = random_chain(seed, 7)
    low, high = bounds(chain)
    for budget in range(low - 2, high + 1, 2):
        expected = rematerialised_s(chain, budget)
        assert exact(chain, budget, offload=False).seconds(budget) == pytest.approx(expected)
        assert exact(replace(chain, bytes_per_s=0.0), budget).seconds(budget) == pytest.approx(expected)


@pytest.mark.parametrize("seed", sampling.some(range(6), 3))
def test_a_sequence_takes_the_time_and_memory_it_was_chosen_for(seed: int) -> None:
    chain = random_chain(seed, 9)
    low, high = bounds(chain)
    program = exact(chain, high)
    for budget in range(low, high + 1, 3):
        operations = program.sequence(budget)
        assert max(memory(walk(operations, chain))) <= budget
        assert fluid_s(operations, chain, budget) == pytest.approx(program.seconds(budget), rel=1e-4)


@pytest.mark.parametrize("seed", sampling.some(range(4), 2))
def test_more_memory_or_a_faster_link_never_hurts(seed: int) -> None:
    chain = random_chain(seed, 8)
    low, high = bounds(chain)
    program = exact(chain, high)
    times = [program.seconds(budget) for budget in range(low, high + 1)]
    assert times == sorted(times, reverse=True)
    budget = (low + high) // 2
    speeds = [
        exact(replace(chain, bytes_per_s=rate), budget).seconds(budget) for rate in (0.0, 1.0, 2.0, 4.0, 8.0, 64.0)
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > speeds[-1]


def test_too_little_memory_has_no_sequence() -> None:
    chain = random_chain(1, 4)
    program = exact(chain, 50)
    assert program.seconds(1) == inf
    assert program.seconds(-1) == inf
    with pytest.raises(ValueError, match="no sequence needs as little as 1 bytes"):
        program.sequence(1)


def test_a_program_is_solved_without_a_compiler() -> None:
    code = (
        "import sys\n"
        "from lt_offload.plan.papers.pofo.program import ChainProgram\n"
        "from tests.support.profiles.pofo_brute import random_chain\n"
        "assert ChainProgram(random_chain(1, 3), memory_bytes=50, slots=50).seconds(50) > 0\n"
        "assert not {'numba', 'torch'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
