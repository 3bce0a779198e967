"""What POFO (NeurIPS 2021) is compared with: sequences by two heuristics of its section 5.1, and their time.

Both heuristics mix rematerialisation and offloading, without the dynamic program's assumptions and without optimality.
Where the paper's description leaves something open, the docstrings say what is done. The dynamic program lets memory
be given back and taken byte by byte; for its experiments the paper turns such solutions into ones in which every copy
moves a whole buffer, whose memory comes and goes at once. So do all times here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.papers.pofo.chain import Chain, Item, Operation, SequenceWalk, memory, resident, sequential, walk
from lt_offload.plan.papers.pofo.kernels import pair
from lt_offload.plan.papers.pofo.program import ChainProgram

_LIMITS = 40
"""Memory limits that autocapper tries."""


def from_scratch(chain: Chain) -> tuple[Operation, ...]:
    """Return the sequence that begins each backward from the chain's input."""
    count = len(chain.layers)
    found = [*_run_up(count), Operation("loss", count + 1)]
    for layer in range(count, 0, -1):
        found += [*_run_up(layer - 1), Operation("all", layer), Operation("backward", layer)]
    return tuple(found)


def _run_up(layer: int) -> list[Operation]:
    return [Operation("none" if at > 1 else "checkpoint", at) for at in range(1, layer + 1)]


class Rematerialisation(ChainProgram):
    """The program without offloading, whose parts the heuristics put together."""

    def __init__(self, chain: Chain, *, memory_bytes: int, slots: int) -> None:
        super().__init__(chain, memory_bytes=memory_bytes, slots=slots, offload=False)

    def part(self, first: int, last: int, memory_bytes: float) -> tuple[Operation, ...] | None:
        """Return the fastest way to run layers backward from the input of ``first``; None if there is none.

        ``memory_bytes`` excludes that input.
        """
        free = self._free(memory_bytes)
        row = pair(first, last, len(self.chain.layers))
        if free < 0 or self._parts[0, row, free, 0] == inf:
            return None
        return tuple(self._backward(first, last, free, 0))


def opportunist_s(chain: Chain, memory_bytes: int, rematerialise: Rematerialisation) -> float:
    """Return the time of the heuristic *opportunist*; infinity if it finds no sequence.

    Whenever the link is idle, the next layer saves all and its input and output are offloaded; the others save
    nothing, until what is left can be kept. The layers between two that save all are run backward as
    ``rematerialise`` says; all memory but that for their input is theirs.
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
            stored = _stored_bytes(chain, first + 1, all_saved=True)
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
            stored = _stored_bytes(chain, at, all_saved=at - 1 in saving)
            idle = max(now + stored / chain.bytes_per_s, now + layer.forward_s) + layer.saved_bytes / chain.bytes_per_s
            saving.add(at)
        now += layer.forward_s
    return saving, len(chain.layers) + 1


def _stored_bytes(chain: Chain, layer: int, *, all_saved: bool) -> int:
    """Return the bytes of the input of ``layer``, in 1 to L + 1: an output, or all that the layer before saved."""
    return chain.layers[layer - 2].saved_bytes if all_saved else chain.output(layer - 1)


def _kept_bytes(chain: Chain, first: int) -> int:
    """Return what it takes to run the layers from ``first`` on and back with everything kept."""
    rest = Chain(
        layers=chain.layers[first - 1 :],
        loss=chain.loss,
        input_bytes=chain.output(first - 1),
        input_gradient_bytes=chain.gradient(first - 1),
    )
    return max(memory(walk(sequential(rest), rest)))


def autocapper_s(chain: Chain, memory_bytes: int, rematerialise: Rematerialisation) -> float:
    """Return the time of the heuristic *autocapper*; infinity if it finds no sequence.

    *capper* takes the sequence that ``rematerialise`` has for a larger memory, and
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


def simulated_s(walked: SequenceWalk, memory_bytes: int, bytes_per_s: float) -> float:
    """Return the time of a sequence within ``memory_bytes``; infinity if it does not fit.

    Copies queue per direction: offloads as their data are made, prefetches in the order of need. A computation waits
    until what it reads is there and what is on its way out has left enough room.
    """
    free = memory_bytes - np.array(memory(walked), dtype=np.int64)
    if free.min() < 0:
        return inf
    travels = [
        _Travel(index=at, bytes=item.bytes, release_after=item.departs, needed=item.returns, fetch=item.returns)
        for at, item in enumerate(walked.items)
        if item.departs is not None and item.returns is not None and item.returns > item.departs + 1
    ]
    if travels:
        starts = np.concatenate([[0.0], np.cumsum(walked.seconds)])
        latest = _latest_fetches(travels, starts, bytes_per_s)
        for slack in (0, 1):
            _fetch_earlier(travels, free, [begin - slack for begin in latest], first=0)
    return _run(walked, travels, free, bytes_per_s)


def _run(walked: SequenceWalk, travels: list[_Travel], free: NDArray[np.int64], bytes_per_s: float) -> float:
    """Compute one after the other; ``free`` is what each computation leaves when all that may be gone is gone."""
    made: dict[int, list[_Travel]] = {}
    fetched: dict[int, list[_Travel]] = {}
    for travel in sorted(travels, key=lambda travel: (travel.needed, -travel.index)):
        made.setdefault(walked.items[travel.index].uses[0], []).append(travel)
        fetched.setdefault(travel.fetch, []).append(travel)
    now = out = back = 0.0
    gone: dict[int, float] = {}
    """By item: when its offload has ended."""
    there: dict[int, float] = {}
    for at, seconds in enumerate(walked.seconds):
        leaving = sorted(
            (gone[t.index], t.bytes) for t in travels if t.release_after < at < t.fetch and gone[t.index] > now
        )
        held = sum(nbytes for _, nbytes in leaving)
        for ends, nbytes in leaving:
            if held <= free[at]:
                break
            now, held = ends, held - nbytes
        for travel in fetched.get(at, ()):
            back = max(back, now, gone[travel.index]) + travel.bytes / bytes_per_s
            there[travel.index] = back
        now = max([now, *(there[t.index] for t in travels if t.needed == at)]) + seconds
        for travel in made.get(at, ()):
            out = max(out, now) + travel.bytes / bytes_per_s
            gone[travel.index] = out
    return now


@dataclass(slots=True)
class _Travel:
    """What is offloaded together."""

    index: int
    """Of the block, or of the item."""
    bytes: int
    release_after: int
    """The moment at whose end its device memory is given back."""
    needed: int
    """The moment that needs it again."""
    fetch: int
    """The moment at whose beginning it takes memory again."""


def _latest_fetches(travels: Sequence[_Travel], starts: NDArray[np.float64], bytes_per_s: float) -> list[int]:
    """Return, per travel, the moment in which its copy has to begin so that no computation waits for it.

    ``starts`` has the time at which each moment begins, and at which the last one ends.
    """
    begin = [0] * len(travels)
    latest = float(starts[-1])
    for at in sorted(range(len(travels)), key=lambda at: -travels[at].needed):
        latest = min(latest, float(starts[travels[at].needed])) - travels[at].bytes / bytes_per_s
        begin[at] = int(np.searchsorted(starts, latest, side="right")) - 1
    return begin


def _fetch_earlier(travels: Sequence[_Travel], free: NDArray[np.int64], begin: Sequence[int], *, first: int) -> None:
    """Let each copy take memory in the moment ``begin``, or as soon after as there is ``free`` memory from then on.

    None does before ``first``. Copies queue in the order of need; none is worth its memory before the one ahead of it.
    """
    for at in sorted(range(len(travels)), key=lambda at: (travels[at].needed, -travels[at].index)):
        travel = travels[at]
        earliest = max(begin[at], first, travel.release_after + 1)
        while travel.fetch > earliest and free[travel.fetch - 1] >= travel.bytes:
            travel.fetch -= 1
            free[travel.fetch] -= travel.bytes
        first = max(first, travel.fetch)
