"""Sequences on chains: their memory, and what they lack."""

from __future__ import annotations

from math import inf

import pytest

from lt_offload.plan.papers.pofo.chain import Chain, ChainLayer, Operation, memory, sequential, walk
from lt_offload.plan.papers.pofo.program import ChainProgram
from tests.support.profiles.pofo_brute import from_scratch

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
    program = ChainProgram(chain, memory_bytes=250, slots=25, offload=False)
    assert program.seconds(least) < inf
    assert program.seconds(least - 10) == inf
