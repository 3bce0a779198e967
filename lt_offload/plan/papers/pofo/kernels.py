"""The dynamic program of POFO (NeurIPS 2021), appendix B: one equation at a time for all memories and all data to copy.

Corrected where the printed equations are wrong (the checks against enumeration fail otherwise):

- B.1 counts the gradient of the last layer in the forward phase, where there is none yet;
- B.1, case 2, lets a part end at layer L - 1 at most; it may end at L, because the loss is layer L + 1;
- B.3, case 1, judges feasibility by the requirements within (i, i); those within (i, j) are needed;
- B.3, case 2, judges it for the forwards before j; those up to i' are what runs;
- memory plus data still to be prefetched may exceed the device at the end of a part: the wait takes care of it.

Times are in units of the time that the link needs for one slot, so data and times are the same numbers; what the link
moves during a computation is kept apart from its time only because it may have been rounded to whole slots. Memory is
counted as what is free (``N - A`` of the paper): one table answers for every memory up to the largest.
Choices are not stored; walking down from the root, they are found again.

Slots that are free, to offload and to prefetch are arrays that broadcast against each other: the axes of a table, or
single numbers for a walk. Where an equation does not hold its index into a table may lie outside; it is clipped, and
the value is infinite.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.papers.pofo.chain import SlotSizes

Table = NDArray[np.float32]
Slots = NDArray[np.intp]
Values = NDArray[np.floating[Any]]

_NOISE = 1e-3
"""Part of a slot that single precision does not tell from a whole one."""
_AT_ONCE = 1 << 15
"""Entries of a table: more do not fit into a processor's cache."""


class Choice:
    """The smallest values so far, and what gives them; a later one has to be smaller."""

    def __init__(self, shape: tuple[int, ...], *fields: str) -> None:
        """``fields``: what is kept besides the value; a table needs nothing."""
        self.value = np.full(shape, inf)
        self._kept = {name: np.zeros(shape) for name in fields}

    def offer(self, where: NDArray[np.bool_], value: Values, **fields: Values | Slots | float) -> None:
        """Take ``value`` where it may be taken and is smaller."""
        better = where & (value < self.value)
        np.copyto(self.value, value, where=better)
        for name, kept in self._kept.items():
            np.copyto(kept, fields[name], where=better)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self._kept[name]

    def only(self, name: str) -> int:
        """Return a field of the only value."""
        return int(self._kept[name].item())


def pair(i: int, j: int, count: int) -> int:
    """Return the row of layers ``i`` to ``j`` of ``count`` in the table of the backward phase."""
    return (i - 1) * count - (i - 1) * (i - 2) // 2 + j - i


def _pending(data: Values) -> Slots:
    whole: Slots = np.maximum(0.0, np.ceil(data - _NOISE)).astype(np.intp)
    return whole


def _entry(table: Table, *index: Slots) -> Table:
    return table[tuple(np.clip(at, 0, size - 1) for at, size in zip(index, table.shape, strict=True))]


def backward_part(s: SlotSizes, table: Table, i: int, j: int, free: Slots, due: Slots, choice: Choice) -> None:
    """Offer the times to run layers ``i`` to ``j`` backward from the stored input of ``i``: C of eq. 2.

    ``free`` excludes that input; ``due`` slots must have been prefetched by the end. Fields of ``choice``:

    - ``moved``: the slots that the link can move meanwhile;
    - ``split``: 0 if layer ``i`` saves all, else the last layer before the next checkpoint;
    - ``left``: what is due at the end of the part from there (or from ``i + 1``) to ``j``.
    """
    count = len(s.last) - 2
    saving, back = s.gradient[j] + s.needs_saving[i], s.needs_backward[i]
    both, moves = s.forward[i] + s.backward[i], s.moved_forward[i] + s.moved_backward[i]
    fits = max(saving, back) <= free
    if i == j:
        wait = np.maximum(np.maximum(0.0, saving - free + due - s.moved_backward[i]), back - free + due)
        choice.offer(fits, both + wait, moved=moves + wait, split=0, left=0)
        return
    wait = np.maximum(0, back - free + due)
    # What the link does not bring during this backward has to come before it, while the layers above run backward.
    left, rest, row = _pending(due - s.moved_backward[i] - wait), free - s.saved[i], pair(i + 1, j, count)
    inner = _entry(table[1, row], rest, left)
    late = wait + np.maximum(0.0, saving - free + np.maximum(0.0, left - inner))
    value = both + _entry(table[0, row], rest, left) + late
    choice.offer(fits & (rest >= 0), value, moved=moves + inner + late, split=0, left=left)
    _with_checkpoint(s, table, i, j, free, due, choice)


def _with_checkpoint(s: SlotSizes, table: Table, i: int, j: int, free: Slots, due: Slots, choice: Choice) -> None:
    """Offer what ``backward_part`` takes if another input than that of ``i`` is stored on the way: B.3, case 2."""
    count, single = len(s.last) - 2, s.before[j + 1] - s.before[i]
    again, moves, highest, later = 0.0, 0.0, 0, -inf
    open_ = np.ones_like(choice.value, dtype=bool)
    for split in range(i, j):
        again += s.forward[split]
        moves += s.moved_forward[split]
        needs = s.needs_first[i] if split == i else s.needs_next[split]
        highest = max(highest, needs)
        # The forward that needs the most at its time, less what the link moves during the forwards behind it.
        later = max(later - s.moved_forward[split], float(needs))
        rest = free - s.output[split]
        # Even without any wait it would take longer than what was found:
        # such entries are closed, and most loops end early.
        open_ &= (s.gradient[j] + highest <= free) & (rest >= 0) & (single + again < choice.value)
        if not open_.any():
            return
        row, upper = pair(i, split, count), pair(split + 1, j, count)
        lower, meanwhile = _entry(table[0, row], free, due), _entry(table[1, row], free, due)
        after = _pending(due - meanwhile)
        inner = _entry(table[1, upper], rest, after)
        late = np.maximum(0.0, s.gradient[j] + later - free + np.maximum(0.0, after - inner))
        value = again + lower + _entry(table[0, upper], rest, after) + late
        choice.offer(open_, value, moved=moves + meanwhile + inner + late, split=split, left=after)


def fill_backward(s: SlotSizes, table: Table) -> None:
    """Fill the table of the backward phase: (time or slots moved, layers, free slots, due slots)."""
    count = len(s.last) - 2
    free, due = np.ogrid[: table.shape[2], : table.shape[3]]
    for length in range(count):
        for i in range(1, count + 1 - length):
            choice = Choice(table.shape[2:], "moved")
            backward_part(s, table, i, i + length, free, due, choice)
            row = pair(i, i + length, count)
            table[0, row] = choice.value
            table[1, row] = np.where(choice.value < inf, choice["moved"], inf)


def forward_part(
    s: SlotSizes, parts: Table, table: Table, x: int, i: int, free: Slots, out: Slots, due: Slots, choice: Choice
) -> None:
    """Offer the times from the forward of layer ``i`` to its backward: OC of eq. 1.

    ``free`` includes its input, which is all that the layer before saved if ``x`` is 1. ``out`` slots of earlier
    layers are still to be offloaded, ``due`` slots of them must have been prefetched by the end. Fields of ``choice``:

    - ``end``: 0 if layer ``i`` saves all, else the last layer before the next checkpoint;
    - ``moved``: whether the input is offloaded;
    - ``out``, ``due``: what is to be offloaded and prefetched from there on.
    """
    stored = s.saved[i - 1] if x else s.output[i - 1]
    if i == len(s.last) - 1:
        _at_loss(s, stored, free, out, due, choice)
        return
    travels = stored > 0 and bool(s.saved_travels[i - 1] if x else s.input_travels[i])
    _saving(s, table, stored, travels, i, free, out, due, choice)
    _running_again(s, parts, table, stored, travels, i, free, out, due, choice)


def _at_loss(s: SlotSizes, stored: int, free: Slots, out: Slots, due: Slots, choice: Choice) -> None:
    """Offer the time of the loss, between whose forward and backward all copies to the host end."""
    loss = len(s.last) - 1
    fits = max(s.needs_saving[loss], s.needs_backward[loss]) + stored <= free
    wait = np.maximum(0, s.needs_saving[loss] + out + stored - free)
    late = np.maximum(0, s.needs_backward[loss] + due + stored - free)
    rest = np.maximum(0.0, out - s.moved_forward[loss] - wait) + np.maximum(0.0, due - s.moved_backward[loss] - late)
    choice.offer(fits, s.forward[loss] + s.backward[loss] + wait + late + rest, end=0, moved=0, out=0, due=0)


def _saving(
    s: SlotSizes, table: Table, stored: int, travels: bool, i: int, free: Slots, out: Slots, due: Slots, choice: Choice
) -> None:
    """Offer what ``forward_part`` takes if layer ``i`` saves all: B.1, case 1."""
    fits = max(s.needs_saving[i], s.needs_backward[i]) + stored <= free
    wait = np.maximum(0, s.needs_saving[i] + out + stored - free)
    late = np.maximum(0, s.needs_backward[i] + due + stored - free)
    time, done = s.forward[i] + s.backward[i] + wait + late, s.moved_forward[i] + wait
    leaves, comes = _pending(out - done), _pending(due - s.moved_backward[i] - late)
    value = time + _entry(table[1, i + 1], free - stored, leaves, comes)
    choice.offer(fits, value, end=0, moved=0, out=leaves, due=comes)
    if travels:
        more = _pending(out + stored - done)
        value = time + _entry(table[1, i + 1], free, more, comes + stored)
        choice.offer(fits, value, end=0, moved=1, out=more, due=comes + stored)


def _running_again(
    s: SlotSizes,
    parts: Table,
    table: Table,
    stored: int,
    travels: bool,
    i: int,
    free: Slots,
    out: Slots,
    due: Slots,
    choice: Choice,
) -> None:
    """Offer what ``forward_part`` takes if layers from ``i`` on run again: B.1, case 2."""
    count, single = len(s.last) - 2, s.before[len(s.last)] - s.before[i]
    again, moves, highest, later = 0.0, 0.0, 0, -inf
    open_ = np.ones_like(choice.value, dtype=bool)
    rest = free - stored
    for end in range(i, s.last[i] + 1):
        needs = s.needs_first[i] if end == i else s.needs_next[end]
        later = max(later, needs - moves)
        again += s.forward[end]
        moves += s.moved_forward[end]
        open_ &= (needs + (stored if end == i else 0) <= free) & (single + again < choice.value)
        if not open_.any():
            return
        if end > i:
            highest = max(highest, needs)
        row = pair(i, end, count)
        inside = _entry(parts[0, row], rest, due)
        wait = np.maximum(0.0, later + out + stored - free)
        time, comes = again + wait + inside, _pending(due - _entry(parts[1, row], rest, due))
        held, gone = _pending(out - moves - wait), _pending(out + stored - moves - wait)
        known = open_ & (rest >= 0)
        value = time + _entry(table[0, end + 1], rest, held, comes)
        choice.offer(known & (highest + stored <= free), value, end=end, moved=0, out=held, due=comes)
        if travels:
            value = time + _entry(table[0, end + 1], free, gone, comes + stored)
            choice.offer(known & (comes + stored <= free), value, end=end, moved=1, out=gone, due=comes + stored)


def fill_forward(s: SlotSizes, parts: Table, table: Table) -> None:
    """Fill the table of the forward phase: (kind of input, layer, free slots, slots to offload, slots to prefetch).

    Every forward waits until what is still to be offloaded fits beside what it needs, and every backward for what is
    to be prefetched; so neither ever exceeds what is free.
    """
    slots, travelling = table.shape[2], table.shape[3] * table.shape[4]
    rows = max(1, _AT_ONCE // travelling)
    for i in range(len(s.last) - 1, 0, -1):
        for x in range(2 if i > 1 else 1):
            for least in range(0, slots, rows):
                most = min(least + rows, slots)
                free, out, due = np.ogrid[least:most, : min(most, table.shape[3]), : min(most, table.shape[4])]
                shape = np.broadcast_shapes(free.shape, out.shape, due.shape)
                choice = Choice(shape)
                forward_part(s, parts, table, x, i, free, out, due, choice)
                possible = (out <= free) & (due <= free)
                table[x, i, least:most, : shape[1], : shape[2]] = np.where(possible, choice.value, inf)
