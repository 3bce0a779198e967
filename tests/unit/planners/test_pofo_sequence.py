"""Sequences on chains: their memory, their time with whole copies, and the heuristics that make some."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from lt_offload.plan.papers.pofo.chain import Chain, ChainLayer, Operation, memory, sequential, walk
from lt_offload.plan.papers.pofo.program import ChainProgram
from scripts.papers.pofo_heuristics import Rematerialisation, autocapper_s, from_scratch, opportunist_s, simulated_s
from tests.support.profiles.pofo_brute import random_chain

LOSS = ChainLayer(forward_s=0.0, backward_s=0.0, output_bytes=0, saved_bytes=0, gradient_bytes=0)


def uniform(layers: int, *, rate: float = 10.0) -> Chain:
    """1 s forward, 2 s backward, 10 bytes of output, 40 saved; the input takes 10."""
    layer = ChainLayer(forward_s=1.0, backward_s=2.0, output_bytes=10, saved_bytes=40, gradient_bytes=10)
    return Chain(layers=(layer,) * layers, loss=LOSS, input_bytes=10, input_gradient_bytes=10, bytes_per_s=rate)


def operations(text: str) -> list[Operation]:
    kinds = {"A": "all", "C": "checkpoint", "N": "none", "B": "backward", "L": "loss", "O": "offload", "P": "prefetch"}
    return [Operation(kinds[word[0]], int(word[1:])) for word in text.split()]  # type: ignore[arg-type]


def test_memory_of_keeping_everything() -> None:
    # The input and what has been saved; from the loss on one gradient, two within a backward.
    assert memory(walk(sequential(uniform(2)), uniform(2))) == [50, 90, 90, 100, 110, 70]


def test_memory_of_running_again() -> None:
    chain = uniform(3)
    text = "C1 N2 A3 L4 B3 C1 A2 B2 A1 B1"
    walked = walk(operations(text), chain)
    # In the first backward: the input, the output of layer 2, what layer 3 saved, two gradients.
    assert memory(walked) == [20, 30, 60, 60, 70, 80, 30, 70, 80, 60, 70]
    assert sum(walked.seconds) == chain.sequential_s + 3.0


def test_what_travels_takes_no_memory_between_its_uses() -> None:
    chain = uniform(3)
    walked = walk(operations("A1 O2 A2 A3 L4 P2 B3 B2 B1"), chain)
    kept = memory(walk(sequential(chain), chain))
    # What layer 1 saved is read by forward 2, and again by backward 2.
    assert [a - b for a, b in zip(kept, memory(walked), strict=True)] == [0, 0, 40, 40, 40, 40, 0, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("C1 N2 A2 L3", "the input of layer 2 is not stored"),
        ("C1 A2 L3 B2 B1", "layer 1 has not saved what its backward needs"),
    ],
)
def test_a_sequence_that_lacks_something_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        walk(operations(text), uniform(2))


def test_from_scratch_needs_the_least_memory() -> None:
    chain = uniform(5)
    least = max(memory(walk(from_scratch(chain), chain)))
    program = Rematerialisation(chain, memory_bytes=250, slots=25)
    assert program.seconds(least) < inf
    assert program.seconds(least - 10) == inf


def test_copies_run_beside_computations() -> None:
    chain = uniform(4, rate=40.0)
    walked = walk(operations("A1 O2 A2 A3 A4 L5 P2 B4 B3 B2 B1"), chain)
    room = max(memory(walked))
    assert room < max(memory(walk(sequential(chain), chain)))
    # One second per copy: it leaves during forward 2, before forward 4 needs its room, and returns during backward 3.
    assert simulated_s(walked, room, 40.0) == pytest.approx(chain.sequential_s)
    # Eight seconds: forward 4, or the loss, waits for it to leave; backward 2 waits for it to return.
    assert simulated_s(walked, room, 5.0) > chain.sequential_s + 8.0


def test_a_copy_that_cannot_be_hidden_is_waited_for() -> None:
    chain = uniform(3, rate=20.0)
    walked = walk(operations("A1 O2 A2 A3 L4 P2 B3 B2 B1"), chain)
    roomy = max(memory(walk(sequential(chain), chain)))
    assert simulated_s(walked, roomy, 20.0) == pytest.approx(chain.sequential_s)
    # It leaves from 1 s to 5 s, is back at 9 s, and backward 2 would have begun at 5 s.
    assert simulated_s(walked, roomy, 10.0) == pytest.approx(chain.sequential_s + 4.0)


def test_what_does_not_fit_takes_for_ever() -> None:
    chain = uniform(3)
    walked = walk(sequential(chain), chain)
    assert simulated_s(walked, max(memory(walked)) - 1, 10.0) == inf


@pytest.mark.parametrize("seed", range(5))
def test_whole_copies_take_the_time_of_the_computations_or_more(seed: int) -> None:
    chain = random_chain(seed, 10)
    high = max(memory(walk(sequential(chain), chain)))
    for found in ChainProgram(chain, memory_bytes=high, slots=high).sequences():
        walked = walk(found, chain)
        times = [simulated_s(walked, max(memory(walked)) + more, 1.0) for more in (0, high)]
        assert inf > times[0] >= times[1] >= sum(walked.seconds) - 1e-9


@pytest.mark.parametrize("heuristic", [opportunist_s, autocapper_s])
def test_heuristics_stand_between_nothing_lost_and_nothing_found(
    heuristic: Callable[[Chain, int, Rematerialisation], float],
) -> None:
    better = 0
    for seed in range(4):
        chain = random_chain(seed, 12)
        low, high = (max(memory(walk(made(chain), chain))) for made in (from_scratch, sequential))
        alone = Rematerialisation(chain, memory_bytes=high, slots=high)
        assert heuristic(chain, low // 3, alone) == inf
        for budget in range(low, high, 7):
            time = heuristic(chain, budget, alone)
            assert time >= chain.sequential_s - 1e-9
            better += time < alone.seconds(budget) - 1e-6
    assert better > 0


def test_autocapper_keeps_everything_where_it_can() -> None:
    chain = uniform(6)
    high = max(memory(walk(sequential(chain), chain)))
    alone = Rematerialisation(chain, memory_bytes=high, slots=high // 10)
    assert autocapper_s(chain, high, alone) == pytest.approx(chain.sequential_s)


def test_opportunist_saves_whenever_the_link_is_idle() -> None:
    chain = uniform(8, rate=1000.0)
    alone = Rematerialisation(chain, memory_bytes=400, slots=40)
    # Layers 1 and 3 are offloaded; from 4 on there is room. What layer 1 saved still travels when layer 2 begins.
    assert opportunist_s(chain, 250, alone) == pytest.approx(chain.sequential_s + 1.0)
