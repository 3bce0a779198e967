"""The dynamic program of POFO (NeurIPS 2021), appendix B, compiled; importing it imports numba.

Corrected where the printed equations are wrong (the checks against enumeration fail otherwise):

- B.1 counts the gradient of the last layer in the forward phase, where there is none yet;
- B.1, case 2, lets a part end at layer L - 1 at most; it may end at L, because the loss is layer L + 1;
- B.3, case 1, judges feasibility by the requirements within (i, i); those within (i, j) are needed;
- B.3, case 2, judges it for the forwards before j; those up to i' are what runs;
- memory plus data still to be prefetched may exceed the device at the end of a part: the wait takes care of it.

Times are in units of the time that the link needs for one slot, so data and times are the same numbers; what the link
moves during a computation is kept apart from its time only because it may have been rounded to whole slots. Memory is
counted as what is free (``N - A`` of the paper): one table answers for every memory up to the largest.
What was chosen is not stored; walking down from the root, it is found again.
"""

from __future__ import annotations

from math import ceil, inf

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lt_offload.plan.planners.pofo.chain import SlotSizes

Table = NDArray[np.float32]

_NOISE = 1e-3
"""Part of a slot that single precision does not tell from a whole one."""


@njit(cache=True)
def pair(i: int, j: int, count: int) -> int:
    """Return the row of layers ``i`` to ``j`` of ``count`` in the table of the backward phase."""
    return (i - 1) * count - (i - 1) * (i - 2) // 2 + j - i


@njit(cache=True)
def pending(data: float) -> int:
    """Return the slots that are still to be copied."""
    return max(0, ceil(data - _NOISE))


@njit(cache=True)
def backward_part(s: SlotSizes, table: Table, i: int, j: int, free: int, due: int) -> tuple[float, float, int, int]:
    """Return the time to run layers ``i`` to ``j`` backward from the stored input of ``i``: C of eq. 2.

    ``free`` excludes that input; ``due`` slots must have been prefetched by the end.

    Returns:
        The time; the slots that the link can move meanwhile; the choice: 0 if layer ``i`` saves all, else the last
        layer before the next checkpoint; and what is due at the end of the part from there (or from ``i + 1``) to
        ``j``.
    """
    count = len(s.last) - 2
    saving, back = s.gradient[j] + s.needs_saving[i], s.needs_backward[i]
    best, moved, decision, left = inf, inf, 0, 0
    if max(saving, back) <= free:
        both, moves = s.forward[i] + s.backward[i], s.moved_forward[i] + s.moved_backward[i]
        if i == j:
            wait = max(0.0, saving - free + due - s.moved_backward[i], back - free + due)
            return both + wait, moves + wait, 0, 0
        if s.saved[i] <= free:
            wait = max(0, back - free + due)
            left = pending(due - s.moved_backward[i] - wait)
            row = pair(i + 1, j, count)
            inner = table[1, row, free - s.saved[i], left]
            late = wait + max(0.0, saving - free + max(0.0, left - inner))
            best = both + table[0, row, free - s.saved[i], left] + late
            moved = moves + inner + late
    single = s.before[j + 1] - s.before[i]
    again, moves, highest, later = 0.0, 0.0, 0, -inf
    for split in range(i, j):
        again += s.forward[split]
        moves += s.moved_forward[split]
        needs = s.needs_first[i] if split == i else s.needs_next[split]
        highest = max(highest, needs)
        later = max(later - s.moved_forward[split], float(needs))
        if s.gradient[j] + highest > free or s.output[split] > free or single + again >= best:
            break
        row, rest = pair(i, split, count), free - s.output[split]
        if table[0, row, free, due] == inf:
            continue
        after = pending(due - table[1, row, free, due])
        upper = pair(split + 1, j, count)
        late = max(0.0, s.gradient[j] + later - free + max(0.0, after - table[1, upper, rest, after]))
        value = again + table[0, row, free, due] + table[0, upper, rest, after] + late
        if value < best:
            best, decision, left = value, split, after
            moved = moves + table[1, row, free, due] + table[1, upper, rest, after] + late
    return best, moved, decision, left


@njit(cache=True)
def fill_backward(s: SlotSizes, table: Table) -> None:
    """Fill the table of the backward phase: (time or slots moved, layers, free slots, due slots)."""
    count = len(s.last) - 2
    for length in range(count):
        for i in range(1, count + 1 - length):
            row = pair(i, i + length, count)
            for free in range(table.shape[2]):
                for due in range(table.shape[3]):
                    found = backward_part(s, table, i, i + length, free, due)
                    table[0, row, free, due], table[1, row, free, due] = found[0], found[1]


@njit(cache=True)
def forward_part(
    s: SlotSizes, parts: Table, table: Table, x: int, i: int, free: int, out: int, due: int
) -> tuple[float, int, bool, int, int]:
    """Return the time from the forward of layer ``i`` to its backward: OC of eq. 1.

    ``free`` includes its input, which is all that the layer before saved if ``x`` is 1. ``out`` slots of earlier
    layers are still to be offloaded, ``due`` slots of them must have been prefetched by the end.

    Returns:
        The time; the choice: 0 if layer ``i`` saves all, else the last layer before the next checkpoint; whether the
        input is offloaded; and what is to be offloaded and prefetched from there on.
    """
    stored = s.saved[i - 1] if x else s.output[i - 1]
    if i == len(s.last) - 1:
        return _at_loss(s, stored, free, out, due), 0, False, 0, 0
    travels = stored > 0 and (s.saved_travels[i - 1] if x else s.input_travels[i])
    kept = _saving(s, table, stored, travels, i, free, out, due)
    again = _running_again(s, parts, table, stored, travels, i, free, out, due, kept[0])
    return again if again[0] < kept[0] else kept


@njit(cache=True)
def _at_loss(s: SlotSizes, stored: int, free: int, out: int, due: int) -> float:
    """Return the time of the loss, between whose forward and backward all copies to the host end."""
    loss = len(s.last) - 1
    if max(s.needs_saving[loss], s.needs_backward[loss]) + stored > free:
        return inf
    wait = max(0, s.needs_saving[loss] + out + stored - free)
    late = max(0, s.needs_backward[loss] + due + stored - free)
    rest = max(0.0, out - s.moved_forward[loss] - wait) + max(0.0, due - s.moved_backward[loss] - late)
    return float(s.forward[loss] + s.backward[loss] + wait + late + rest)


@njit(cache=True)
def _saving(
    s: SlotSizes, table: Table, stored: int, travels: bool, i: int, free: int, out: int, due: int
) -> tuple[float, int, bool, int, int]:
    """Return what ``forward_part`` does if layer ``i`` saves all: B.1, case 1."""
    if max(s.needs_saving[i], s.needs_backward[i]) + stored > free:
        return inf, 0, False, 0, 0
    wait = max(0, s.needs_saving[i] + out + stored - free)
    late = max(0, s.needs_backward[i] + due + stored - free)
    time, done = s.forward[i] + s.backward[i] + wait + late, s.moved_forward[i] + wait
    leaves, comes = pending(out - done), pending(due - s.moved_backward[i] - late)
    value = time + table[1, i + 1, free - stored, leaves, comes]
    if travels:
        more = pending(out + stored - done)
        other = time + table[1, i + 1, free, more, comes + stored]
        if other < value:
            return other, 0, True, more, comes + stored
    return value, 0, False, leaves, comes


@njit(cache=True)
def _running_again(
    s: SlotSizes,
    parts: Table,
    table: Table,
    stored: int,
    travels: bool,
    i: int,
    free: int,
    out: int,
    due: int,
    best: float,
) -> tuple[float, int, bool, int, int]:
    """Return what ``forward_part`` does if layers from ``i`` on run again, where that beats ``best``: B.1, case 2."""
    count, single = len(s.last) - 2, s.before[len(s.last)] - s.before[i]
    decision, moved, out_left, due_left = 0, False, 0, 0
    again, moves, highest, later = 0.0, 0.0, 0, -inf
    for end in range(i, s.last[i] + 1):
        needs = s.needs_first[i] if end == i else s.needs_next[end]
        later = max(later, needs - moves)
        again += s.forward[end]
        moves += s.moved_forward[end]
        if needs + (stored if end == i else 0) > free or single + again >= best:
            break
        if end > i:
            highest = max(highest, needs)
        row = pair(i, end, count)
        if parts[0, row, free - stored, due] == inf:
            continue
        wait = max(0.0, later + out + stored - free)
        time = again + wait + parts[0, row, free - stored, due]
        comes = pending(due - parts[1, row, free - stored, due])
        if highest + stored <= free:
            leaves = pending(out - moves - wait)
            value = time + table[0, end + 1, free - stored, leaves, comes]
            if value < best:
                best, decision, moved, out_left, due_left = value, end, False, leaves, comes
        if travels and comes + stored <= free:
            leaves = pending(out + stored - moves - wait)
            value = time + table[0, end + 1, free, leaves, comes + stored]
            if value < best:
                best, decision, moved, out_left, due_left = value, end, True, leaves, comes + stored
    return best, decision, moved, out_left, due_left


@njit(cache=True)
def fill_forward(s: SlotSizes, parts: Table, table: Table) -> None:
    """Fill the table of the forward phase: (kind of input, layer, free slots, slots to offload, slots to prefetch).

    Every forward waits until what is still to be offloaded fits beside what it needs, and every backward for what is
    to be prefetched; so neither ever exceeds what is free.
    """
    count = len(s.last) - 2
    for i in range(count + 1, 0, -1):
        for x in range(2 if i > 1 else 1):
            for free in range(table.shape[2]):
                for out in range(min(free + 1, table.shape[3])):
                    for due in range(min(free + 1, table.shape[4])):
                        table[x, i, free, out, due] = forward_part(s, parts, table, x, i, free, out, due)[0]
