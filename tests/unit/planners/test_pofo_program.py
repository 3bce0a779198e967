"""The dynamic program of POFO against enumeration, a program of another kind, and what has to hold in any case."""

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


@pytest.mark.parametrize("seed", range(20, 28))
def test_equals_enumeration_with_four_layers(seed: int) -> None:
    chain = random_chain(seed, 4)
    low, high = bounds(chain)
    budget = (3 * low + high) // 4
    best = min(fluid_s(operations, chain, budget) for operations in sequences(chain))
    assert best < inf
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


def test_one_program_answers_for_every_smaller_memory() -> None:
    chain = random_chain(3, 6)
    low, high = bounds(chain)
    program = exact(chain, high)
    for budget in range(low, high, 4):
        assert program.seconds(budget) == pytest.approx(exact(chain, budget).seconds(budget))


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


def test_with_room_for_everything_nothing_is_lost() -> None:
    chain = random_chain(1, 8)
    _, high = bounds(chain)
    program = exact(chain, high)
    assert program.seconds(high) == pytest.approx(chain.sequential_s)
    assert program.sequence(high) == sequential(chain)


def test_too_little_memory_has_no_sequence() -> None:
    chain = random_chain(1, 4)
    program = exact(chain, 50)
    assert program.seconds(1) == inf
    assert program.seconds(-1) == inf
    with pytest.raises(ValueError, match="no sequence needs as little as 1 bytes"):
        program.sequence(1)


def test_layers_that_cannot_run_again_do_not() -> None:
    chain = random_chain(5, 6)
    stiff = replace(
        chain,
        layers=tuple(
            replace(layer, checkpoints=at != 1, discards=at != 4, saved_travels=at != 2, input_travels=False)
            for at, layer in enumerate(chain.layers)
        ),
    )
    low, high = bounds(chain)
    program, free = exact(stiff, high), exact(chain, high)
    slower = False
    for budget in range(low, high):
        assert program.seconds(budget) >= free.seconds(budget)
        slower |= program.seconds(budget) > free.seconds(budget)
        if program.seconds(budget) == inf:
            continue
        operations = program.sequence(budget)
        loss = next(at for at, operation in enumerate(operations) if operation.kind == "loss")
        first = {(operation.kind, operation.layer) for operation in operations[:loss]}
        assert ("checkpoint", 2) not in first
        assert ("none", 5) not in first
        saved = {layer for kind, layer in first if kind == "all"}
        moved = {layer for kind, layer in first if kind == "offload"}
        assert all(layer - 1 in saved and layer - 1 != 3 for layer in moved)
    assert slower


def test_offloading_alone_runs_nothing_twice() -> None:
    chain = random_chain(2, 6)
    low, high = bounds(chain)
    program = exact(chain, high, recompute=False)
    budget = next(budget for budget in range(low, high) if program.seconds(budget) < inf)
    assert budget < high
    computations = walk(program.sequence(budget), chain).computations
    assert len(computations) == 2 * (len(chain.layers) + 1)


@pytest.mark.slow
def test_rounding_to_the_nearest_slot_is_closer_than_rounding_up() -> None:
    chain = random_chain(7, 20)
    low, high = bounds(chain)
    budget = (low + high) // 2
    true = exact(chain, budget).seconds(budget)
    up = ChainProgram(chain, memory_bytes=budget, slots=25).seconds(budget)
    nearest = ChainProgram(chain, memory_bytes=budget, slots=25, nearest=True).seconds(budget)
    assert up >= true - 1e-3
    assert abs(nearest - true) < up - true


def test_the_sequences_of_a_program_differ_and_get_slower() -> None:
    chain = random_chain(4, 8)
    _, high = bounds(chain)
    program = exact(chain, high)
    found = list(program.sequences())
    assert found[0] == sequential(chain)
    assert len(set(found)) == len(found) > 5
    needed = [max(memory(walk(operations, chain))) for operations in found]
    assert needed[-1] < needed[0]


def test_a_program_is_solved_without_a_compiler() -> None:
    code = (
        "import sys\n"
        "from lt_offload.plan.papers.pofo.program import ChainProgram\n"
        "from tests.support.profiles.pofo_brute import random_chain\n"
        "assert ChainProgram(random_chain(1, 3), memory_bytes=50, slots=50).seconds(50) > 0\n"
        "assert not {'numba', 'torch'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
