"""The two heuristics that POFO (NeurIPS 2021) is compared with in its section 5.1. Knows sequences; no plans.

Both mix rematerialisation and offloading, without the dynamic program's assumptions and without optimality. Where the
paper's description leaves something open, the docstrings say what is done.
"""

from __future__ import annotations

from math import inf

import numpy as np

from lt_offload.plan.planners.pofo.chain import Chain
from lt_offload.plan.planners.pofo.program import ChainProgram
from lt_offload.plan.planners.pofo.sequence import Item, Operation, SequenceWalk, memory, resident, sequential, walk
from lt_offload.plan.planners.pofo.timing import simulated_s

_LIMITS = 40
"""Memory limits that autocapper tries."""


def opportunist_s(chain: Chain, memory_bytes: int, rematerialise: ChainProgram) -> float:
    """Return the time of the heuristic *opportunist*; infinity if it finds no sequence.

    Whenever the link is idle, the next layer saves all and its input and output are offloaded; the others save
    nothing, until what is left can be kept. The layers between two that save all are run backward as
    ``rematerialise``, a program without offloading, says; all memory but that for their input is theirs.
    """
    saving, tail = _forward(chain, memory_bytes)
    count = len(chain.layers)
    operations: list[Operation] = []
    for layer in range(1, count + 1):
        if layer in saving or layer - 1 in saving:
            operations.append(Operation("offload", layer))
        if layer in saving or layer >= tail:
            operations.append(Operation("all", layer))
        else:
            operations.append(Operation("checkpoint" if layer - 1 in saving else "none", layer))
    operations.append(Operation("loss", count + 1))
    operations += [Operation("backward", layer) for layer in range(count, tail - 1, -1)]
    end = tail - 1
    for first in sorted(saving, reverse=True):
        if end > first:
            stored = chain.stored(first + 1, all_saved=True)
            part = rematerialise.part(first + 1, end, memory_bytes - stored)
            if part is None:
                return inf
            operations += part
        operations.append(Operation("backward", first))
        end = first - 1
    return simulated_s(walk(operations, chain), memory_bytes, chain.bytes_per_s)


def _forward(chain: Chain, memory_bytes: int) -> tuple[set[int], int]:
    """Return the layers that save all for the link's sake, and the first of those that are kept to the end."""
    saving: set[int] = set()
    now = idle = 0.0
    for at, layer in enumerate(chain.layers, 1):
        if saving and _kept_bytes(chain, at) <= memory_bytes:
            return saving, at
        if not saving or now >= idle:
            stored = chain.stored(at, all_saved=at - 1 in saving)
            idle = max(now + stored / chain.bytes_per_s, now + layer.forward_s) + layer.saved_bytes / chain.bytes_per_s
            saving.add(at)
        now += layer.forward_s
    return saving, len(chain.layers) + 1


def _kept_bytes(chain: Chain, first: int) -> int:
    """Return what it takes to run the layers from ``first`` on and back with everything kept."""
    rest = Chain(
        layers=chain.layers[first - 1 :],
        loss=chain.loss,
        input_bytes=chain.output(first - 1),
        input_gradient_bytes=chain.gradient(first - 1),
    )
    return max(memory(walk(sequential(rest), rest)))


def autocapper_s(chain: Chain, memory_bytes: int, rematerialise: ChainProgram) -> float:
    """Return the time of the heuristic *autocapper*; infinity if it finds no sequence.

    *capper* takes the sequence that ``rematerialise``, a program without offloading, has for a larger memory, and
    offloads the activation of the lowest layer that is there at the peak and not in use, until the sequence fits;
    between which uses, the peak says. Of 40 larger memories, up to that where nothing runs twice, the best counts.
    """
    high = max(memory(walk(sequential(chain), chain)))
    best = inf
    seen: set[tuple[Operation, ...]] = set()
    for limit in np.linspace(memory_bytes, max(high, memory_bytes), _LIMITS):
        if rematerialise.seconds(limit) == inf:
            continue
        operations = rematerialise.sequence(limit)
        if operations not in seen:
            seen.add(operations)
            walked = walk(operations, chain)
            if _cap(walked, memory_bytes):
                best = min(best, simulated_s(walked, memory_bytes, chain.bytes_per_s))
    return best


def _cap(walked: SequenceWalk, memory_bytes: int) -> bool:
    """Offload items of ``walked`` until it fits; return whether it does."""
    used = np.array(memory(walked), dtype=np.int64)
    while used.max() > memory_bytes:
        peak = int(used.argmax())
        idle = [item for item in walked.items if item.departs is None and _waits(item, peak)]
        if not idle:
            return False
        item = min(idle, key=lambda item: (item.layer, item.uses[0]))
        before = set(resident(item))
        item.departs = max(use for use in item.uses if use < peak)
        item.returns = min(use for use in item.uses if use > peak)
        used[sorted(before - set(resident(item)))] -= item.bytes
    return True


def _waits(item: Item, at: int) -> bool:
    return item.uses[0] < at < item.uses[-1] and at not in item.uses
