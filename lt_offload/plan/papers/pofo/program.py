"""Solves the dynamic program of POFO (NeurIPS 2021) and reads sequences off its tables.

The equations are in :mod:`lt_offload.plan.papers.pofo.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from lt_offload.plan.papers.pofo.chain import Chain, Operation, in_slots
from lt_offload.plan.papers.pofo.kernels import (
    Choice,
    Slots,
    Table,
    backward_part,
    fill_backward,
    fill_forward,
    forward_part,
)


class ChainProgram:
    """The fastest sequences of one chain for every memory up to the largest.

    With ``recompute=False`` the program of offloading alone; with ``offload=False`` that of rematerialisation alone,
    whose tables are smaller by the square of the slots.
    """

    def __init__(
        self, chain: Chain, *, memory_bytes: int, slots: int, offload: bool = True, recompute: bool = True
    ) -> None:
        """Solve ``chain`` for up to ``memory_bytes`` of memory in ``slots`` steps.

        As sizes are rounded, a sequence may need somewhat more memory and time than the program says.
        """
        self.chain, self.slots, self.slot_bytes = chain, slots, memory_bytes / slots
        self._in_slots = in_slots(chain, self.slot_bytes, offload=offload, recompute=recompute)
        moves = offload and chain.bytes_per_s > 0
        count, free, travelling = len(chain.layers), slots + 1, slots + 1 if moves else 1
        rows = count * (count + 1) // 2 if recompute else 1
        self._parts: Table = np.full((2, rows, free, travelling), inf, dtype=np.float32)
        # Tables are in single precision, and have up to a hundred megabytes all the same; _NOISE allows for it.
        self._table: Table = np.full((2, count + 2, free, travelling, travelling), inf, dtype=np.float32)
        if recompute:
            fill_backward(self._in_slots, self._parts)
        fill_forward(self._in_slots, self._parts, self._table)
        self._slots_per_s = chain.bytes_per_s / self.slot_bytes if moves else 1.0

    def seconds(self, memory_bytes: float) -> float:
        """Return the time of the fastest sequence within ``memory_bytes``; infinity if there is none."""
        free = self._free(memory_bytes)
        return self._seconds(free) if free >= 0 else inf

    def sequence(self, memory_bytes: float) -> tuple[Operation, ...]:
        """Return the fastest sequence within ``memory_bytes``; raises ``ValueError`` if there is none."""
        free = self._free(memory_bytes)
        if free < 0 or self._seconds(free) == inf:
            raise ValueError(f"no sequence needs as little as {memory_bytes} bytes")
        return tuple(self._forward(free))

    def sequences(self) -> Iterator[tuple[Operation, ...]]:
        """Yield the different sequences for every memory, from the largest down."""
        # Many memories have one sequence: each is worth one trial.
        seen: set[tuple[Operation, ...]] = set()
        for free in range(self.slots, -1, -1):
            if self._seconds(free) == inf:
                return
            operations = tuple(self._forward(free))
            if operations not in seen:
                seen.add(operations)
                yield operations

    def _free(self, memory_bytes: float) -> int:
        return min(self.slots, int(memory_bytes / self.slot_bytes + 1e-9))

    def _seconds(self, free: int) -> float:
        return float(self._table[0, 1, free, 0, 0]) / self._slots_per_s

    def _forward(self, free: int) -> Iterator[Operation]:
        """Yield the operations of the whole chain; prefetches stand behind the loss in the order of need."""
        count, s = len(self.chain.layers), self._in_slots
        # The tables hold values only; on the way down each choice is found again by the equation that it came from.
        x, i, out, due = 0, 1, 0, 0
        backward: list[list[Operation]] = []
        prefetches: list[Operation] = []
        while i <= count:
            choice = Choice((1, 1, 1), "end", "moved", "out", "due")
            where = (_single(free, 3), _single(out, 3), _single(due, 3))
            forward_part(s, self._parts, self._table, x, i, *where, choice)
            end, moved, out, after = (choice.only(name) for name in ("end", "moved", "out", "due"))
            stored = int(s.saved[i - 1] if x else s.output[i - 1])
            if moved:
                yield Operation("offload", i)
                prefetches.append(Operation("prefetch", i))
            if end:
                yield Operation("checkpoint", i)
                yield from (Operation("none", k) for k in range(i + 1, end + 1))
                backward.append(list(self._backward(i, end, free - stored, due)))
            else:
                yield Operation("all", i)
                backward.append([Operation("backward", i)])
            free -= 0 if moved else stored
            x, i, due = (0, end + 1, after) if end else (1, i + 1, after)
        yield Operation("loss", count + 1)
        yield from reversed(prefetches)
        for part in reversed(backward):
            yield from part

    def _backward(self, i: int, j: int, free: int, due: int) -> Iterator[Operation]:
        choice = Choice((1, 1), "split", "left")
        backward_part(self._in_slots, self._parts, i, j, _single(free, 2), _single(due, 2), choice)
        split, left = choice.only("split"), choice.only("left")
        if split:
            yield Operation("checkpoint", i)
            yield from (Operation("none", k) for k in range(i + 1, split + 1))
            yield from self._backward(split + 1, j, free - int(self._in_slots.output[split]), left)
            yield from self._backward(i, split, free, due)
            return
        yield Operation("all", i)
        if i < j:
            yield from self._backward(i + 1, j, free - int(self._in_slots.saved[i]), left)
        yield Operation("backward", i)


def _single(number: int, axes: int) -> Slots:
    return np.full((1,) * axes, number, dtype=np.intp)
