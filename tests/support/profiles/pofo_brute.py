"""POFO without the dynamic program: every persistent sequence, each with its best timing, and rematerialisation alone.

Nothing here knows slots or tables. Copies are fluid: memory is given back, or taken, as the bytes move.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from math import inf

from lt_offload.plan.papers.pofo.chain import Chain, ChainLayer, Operation
from tests.support.profiles.pofo_walk import memory, walk

Operations = tuple[Operation, ...]


def from_scratch(chain: Chain) -> Operations:
    """The sequence that begins each backward from the chain's input."""
    count = len(chain.layers)
    found = [*_run_up(count), Operation("loss", count + 1)]
    for layer in range(count, 0, -1):
        found += [*_run_up(layer - 1), Operation("all", layer), Operation("backward", layer)]
    return tuple(found)


def _run_up(layer: int) -> list[Operation]:
    return [Operation("none" if at > 1 else "checkpoint", at) for at in range(1, layer + 1)]


def random_chain(seed: int, layers: int, *, rate: float = 1.0, loss: bool = True) -> Chain:
    """Small whole numbers everywhere, so that the dynamic program rounds nothing."""
    rng = random.Random(seed)

    def layer() -> ChainLayer:
        output, overhead = rng.randint(1, 4), rng.randint(0, 2)
        return ChainLayer(
            forward_s=rng.randint(1, 5),
            backward_s=rng.randint(1, 8),
            output_bytes=output,
            saved_bytes=output + rng.randint(0, 6),
            gradient_bytes=rng.randint(1, 4),
            saving_overhead_bytes=overhead,
            forward_overhead_bytes=overhead,
            backward_overhead_bytes=rng.randint(0, 3),
        )

    return Chain(
        layers=tuple(layer() for _ in range(layers)),
        loss=ChainLayer(
            forward_s=rng.randint(0, 2),
            backward_s=rng.randint(0, 2),
            output_bytes=0,
            saved_bytes=rng.randint(0, 3) if loss else 0,
            gradient_bytes=0,
            saving_overhead_bytes=rng.randint(0, 2) if loss else 0,
            backward_overhead_bytes=rng.randint(0, 3) if loss else 0,
        ),
        input_bytes=rng.randint(1, 4),
        input_gradient_bytes=rng.randint(0, 4),
        bytes_per_s=rate,
    )


def sequences(chain: Chain) -> Iterator[Operations]:
    """Every persistent sequence with every set of offloaded inputs."""
    count = len(chain.layers)
    for forward, parts, moved in _forwards(1, count):
        prefetches = [Operation("prefetch", layer) for layer in reversed(moved)]
        for backward in _products(list(reversed(parts))):
            yield (*forward, Operation("loss", count + 1), *prefetches, *backward)


def _forwards(i: int, count: int) -> Iterator[tuple[list[Operation], list[tuple[int, int, bool]], list[int]]]:
    if i > count:
        yield [], [], []
        return
    for moves in (False, True):
        out = [Operation("offload", i)] if moves else []
        for forward, parts, moved in _forwards(i + 1, count):
            yield [*out, Operation("all", i), *forward], [(i, i, True), *parts], [i] * moves + moved
        for end in range(i, count + 1):
            run = [Operation("checkpoint", i), *(Operation("none", k) for k in range(i + 1, end + 1))]
            for forward, parts, moved in _forwards(end + 1, count):
                yield [*out, *run, *forward], [(i, end, False), *parts], [i] * moves + moved


def _products(parts: list[tuple[int, int, bool]]) -> Iterator[list[Operation]]:
    if not parts:
        yield []
        return
    (i, j, saved), *rest = parts
    first = [[Operation("backward", i)]] if saved else list(backwards(i, j))
    for tail in _products(rest):
        for head in first:
            yield [*head, *tail]


def backwards(i: int, j: int) -> Iterator[list[Operation]]:
    """Every way to run layers ``i`` to ``j`` backward from the stored input of ``i``."""
    if i == j:
        yield [Operation("all", i), Operation("backward", i)]
        return
    for inner in backwards(i + 1, j):
        yield [Operation("all", i), *inner, Operation("backward", i)]
    for split in range(i, j):
        run = [Operation("checkpoint", i), *(Operation("none", k) for k in range(i + 1, split + 1))]
        for upper in backwards(split + 1, j):
            for lower in backwards(i, split):
                yield [*run, *upper, *lower]


def fluid_s(operations: Sequence[Operation], chain: Chain, memory_bytes: int) -> float:
    """The least time of one sequence: offloads as early, prefetches as late as possible; infinity if it does not fit.

    Offloads end before the loss has been computed, prefetches begin after it.
    """
    walked = walk(operations, chain)
    static = memory(walked)
    if max(static) > memory_bytes:
        return inf
    rate = chain.bytes_per_s
    loss = next(at for at, operation in enumerate(walked.computations) if operation.kind == "loss")
    leaving = {item.departs: item.bytes for item in walked.items if item.departs is not None}
    coming = {item.returns: item.bytes for item in walked.items if item.returns is not None}
    total = left = due = 0.0
    for at in range(loss + 1):
        wait = max(0.0, static[at] + left - memory_bytes) / rate if left else 0.0
        total += walked.seconds[at] + wait
        # The operation only reads it, so it leaves meanwhile.
        left += next((item.bytes for item in walked.items if item.departs == at), 0)
        left = max(0.0, left - rate * (walked.seconds[at] + wait))
    assert len(leaving) == len(coming)
    for at in range(len(static) - 1, loss, -1):
        wait = max(0.0, static[at] + due - memory_bytes) / rate if due else 0.0
        total += walked.seconds[at] + wait
        due = max(0.0, due - rate * (walked.seconds[at] + wait)) + coming.get(at, 0)
    return total + (left + due) / rate if rate else total


def rematerialised_s(chain: Chain, memory_bytes: int) -> float:
    """The least time without copies, after Beaumont et al. (2019): one recursion over parts and free memory.

    Before the loss there is no gradient; behind it there is one, whatever runs.
    """
    layers, count = chain.layers, len(chain.layers)

    def forward(k: int, first: bool) -> int:
        layer = layers[k - 1]
        return layer.output_bytes + layer.forward_overhead_bytes + (0 if first else chain.output(k - 1))

    def saving(i: int) -> int:
        return layers[i - 1].saved_bytes + layers[i - 1].saving_overhead_bytes

    def back(i: int) -> int:
        layer = layers[i - 1]
        return layer.saved_bytes + chain.gradient(i) + chain.gradient(i - 1) + layer.backward_overhead_bytes

    @cache
    def part(i: int, j: int, free: int) -> float:
        """Layers i to j; free memory without the input of i. The loss is layer count + 1."""
        loss = j == count + 1
        around = 0 if loss else chain.gradient(j)
        if i == count + 1:
            o = chain.loss
            needs = max(
                o.saved_bytes + o.saving_overhead_bytes,
                o.saved_bytes + o.backward_overhead_bytes + chain.gradient(count),
            )
            return o.forward_s + o.backward_s if needs <= free else inf
        best = inf
        if around + saving(i) <= free and back(i) <= free:
            both = layers[i - 1].forward_s + layers[i - 1].backward_s
            best = both if i == j else both + part(i + 1, j, free - layers[i - 1].saved_bytes)
        for split in range(i, j):
            if around + max(forward(k, k == i) for k in range(i, split + 1)) > free:
                break
            again = sum(layers[k - 1].forward_s for k in range(i, split + 1))
            best = min(best, again + part(split + 1, j, free - chain.output(split)) + part(i, split, free))
        return best

    return part(1, count + 1, memory_bytes - chain.input_bytes)
