"""A table of tied embeddings, updated in two parts: rows of the batch's tokens, and all others.

The last block's gradient arrives first, with the tokens of the batch. The host sets aside what it has for the rows of
these tokens and updates all other rows. At the end come the first block's gradients, as one row per token. They are
added in the order of the backward, as plain PyTorch adds them to the table's gradient, and these rows are updated.

In windows of several micro-batches both parts are added to the sum of those before as soon as they are complete: to
``p.grad`` plain PyTorch adds the gradient of a backward, not one use after the other. So what the sum has for the rows
of a micro-batch's tokens is set aside, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload import limits
from lt_offload.execute.device.base import Cell, Device
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Program
from lt_offload.model.compiled import called, intercept
from lt_offload.schema.plan import Op

RowUpdate = Callable[[Tensor, Sequence[tuple[int, int]], bool], None]
"""Updates rows with a gradient, of all rows or of these alone; whether they are the first of a step."""
Pairs = list[tuple[Tensor, Tensor]]
"""Copies to the host: where to, and what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUse:
    """The host's use of a part of a table's gradient."""

    sums: Tensor | None
    """The sum that it is added to; None: it is used as it is."""
    update: RowUpdate | None
    """The update of its rows; None: it is added up only."""
    edit: Callable[[Tensor], None] | None
    """Clips what an update uses."""
    squares: list[Tensor] | None
    """Gets the sum of squares of what an update uses, if that is asked for."""


_ADDED = 256
"""Rows that are added at a time."""


def tables_of(program: Program, first: nn.Module, weights: Sequence[Weight], device: Device) -> list[Table]:
    """Return the tables that ``program`` updates in two parts, in which the block ``first`` looks rows up."""
    sends = [op for op in program.sends if op.rows == "looked up"]
    return [Table(device, weights[t], op, first, sums=program.adds_up) for op in sends for t in program.tensors[op.id]]


class Table:
    """One such table, through an iteration; the op ``sends`` sends the first block's gradient."""

    def __init__(self, device: Device, weight: Weight, sends: Op, first: nn.Module, *, sums: bool) -> None:
        self.weight, self.sends, self._device = weight, sends, device
        self.cell = Cell(f"host rows {sends.block}")
        self.aside = Cell(f"rows set aside {sends.block}")
        """Tokens, and what has been set aside for their rows."""
        self.begun = False
        """In this pass the last block's gradient is where the sum is: it has begun one."""
        self.filled = False
        """There was a sum when the last block's gradient came."""
        self.arrived: Tensor
        """Host memory for the first block's gradient."""
        width = weight.nbytes // weight.host.shape[0]
        self._most = sends.bytes // width
        """Tokens that there is memory for."""
        shape, dtype = (self._most, weight.host.shape[1]), weight.host.dtype
        self._kept = device.host_empty(shape, dtype)
        self._kept_sums = device.host_empty(shape if sums else (0, shape[1]), dtype)
        self._ids = device.host_empty((self._most,), torch.int64)
        self._outside = device.host_empty((1,), torch.bool)
        self._calls: list[Tensor] = []
        """Tokens, by call of the first block's layer: one call or more per part of the batch."""
        self._sizes: list[int] = []
        self._open = False
        self._before = 0
        """Uses in the last block, whose gradients have come."""
        self._found: list[tuple[int, Tensor]] = []
        """By part whose backward has run: its number, and whether it has a gradient of other rows."""
        self._rows: Tensor | None = None
        """The first block's gradients on the device, part by part in the order of the backward."""
        self._unique = torch.empty(0, dtype=torch.int64)
        layers = [m for m in first.modules() if isinstance(m, nn.Embedding) and m.weight is weight.param]
        # Not by a hook: where the layer is the block, hooks run before the pass begins, and once for all parts.
        self._undo = [intercept(layer, self._noting(called(layer))) for layer in layers]

    def remove(self) -> None:
        """Let calls of the layers be their own again."""
        for undo in self._undo:
            undo()

    def begin(self) -> None:
        """A forward begins whose tokens count."""
        self._calls.clear()
        self._found.clear()
        self._sizes = []
        self._rows, self._open, self._before = None, True, 0

    def look_up(self, ids: Sequence[Tensor]) -> None:
        """Take the tokens of calls that were made before there was a plan."""
        self._calls += ids

    def _noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._open:
                ids = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                self._calls.append(ids.detach())
            return forward(*args, **kwargs)

        return noted

    # -- on the device -----------------------------------------------------------------------------------------------

    @property
    def halfway(self) -> bool:
        """True if the last block's gradient has been sent."""
        return self._before > 0

    def end_last_block(self) -> Tensor:
        """Return the last block's gradient, which is complete."""
        weight, self._open = self.weight, False
        self._before = weight.seen
        if weight.grad is None:
            raise _elsewhere(weight)
        grad, weight.grad = weight.grad, None
        self._sizes = [ids.numel() for ids in self._calls]
        if sum(self._sizes) > self._most:
            self._grow(sum(self._sizes))
        return grad

    def _grow(self, tokens: int) -> None:
        # The update of the step before may still read what there is.
        self._device.drain()
        self._most, shape, dtype = tokens, (tokens, self.weight.host.shape[1]), self.weight.host.dtype
        self._kept, self.arrived = (self._device.host_empty(shape, dtype) for _ in range(2))
        if len(self._kept_sums):
            self._kept_sums = self._device.host_empty(shape, dtype)
        self._ids = self._device.host_empty((tokens,), torch.int64)

    def tokens(self) -> Pairs:
        """Return what is copied with the last block's gradient."""
        return [
            (target, ids.reshape(-1).long())
            for target, ids in zip(torch.split(self._ids[: sum(self._sizes)], self._sizes), self._calls, strict=True)
            if ids.numel()
        ]

    def take(self, grad: Tensor) -> None:
        """Take the rows of a part's tokens out of its gradient."""
        part = self.weight.uses - 1 - self.weight.seen
        ids = [ids.reshape(-1) for ids in self._part(part, self._calls)]
        with torch.no_grad():
            if self._rows is None:
                self._rows = grad.new_empty((sum(self._sizes), grad.shape[1]))
            begin = sum(sum(self._part(done, self._sizes)) for done, _ in self._found)
            for rows in ids:
                torch.index_select(grad, 0, rows, out=self._rows[begin : begin + rows.numel()])
                begin += rows.numel()
            # A gradient that is left then is of other rows and would be lost: `looked_up` refuses it.
            for rows in ids:
                grad.index_fill_(0, rows, 0)
            self._found.append((part, grad.any()))

    def _part(self, part: int, of: list[Any]) -> list[Any]:
        """Return what ``of``, by call, has of one part; every part makes as many calls."""
        each = len(of) // (self.weight.uses - self._before)
        return of[part * each : (part + 1) * each]

    def rows(self) -> Pairs:
        """Return what is copied at the end; nothing without a gradient."""
        if self._rows is None:
            return []
        rows, self._rows = self._rows, None
        flags = torch.stack([flag for _, flag in self._found]).any().reshape(1)
        self._calls.clear()
        size = sum(sum(self._part(part, self._sizes)) for part, _ in self._found)
        return [(self.arrived[:size], rows[:size]), (self._outside, flags)]

    # -- on the host -------------------------------------------------------------------------------------------------

    def other_rows(self, grad: Tensor, use: RowUse) -> Callable[[], None]:
        """Return what sets aside what there is for rows that are looked up, and uses all others of ``grad``."""
        count, filled = sum(self._sizes), self.filled

        def run() -> None:
            self._set_aside(self._kept, grad, count)
            used = grad
            if use.sums is not None:
                if filled:
                    torch.index_select(use.sums, 0, self._unique, out=self._kept_sums[: len(self._unique)])
                used = use.sums.add_(grad) if filled else use.sums.copy_(grad)
            if use.update is None:
                return
            if use.squares is not None:
                used.index_fill_(0, self._unique, 0)
                use.squares.append(square_sum(used))
            if use.edit is not None:
                use.edit(used)
            use.update(used, _between(self._unique.tolist(), len(used)), True)

        return run

    def _set_aside(self, kept: Tensor, grad: Tensor, count: int) -> None:
        self._unique = torch.unique(self._ids[:count])
        torch.index_select(grad, 0, self._unique, out=kept[: len(self._unique)])

    def looked_up(self, use: RowUse) -> Callable[[], None]:
        """Return what adds the first block's gradient of the rows, and uses them."""
        parts = [part for part, _ in self._found]
        sizes, filled, begun = list(self._sizes), self.filled, self.begun
        uses = max(self.weight.uses - self._before, 1)
        each = len(sizes) // uses

        def run() -> None:
            if parts and self._outside.item():
                raise _elsewhere(self.weight)
            if begun:
                assert use.sums is not None
                self._set_aside(self._kept, use.sums, sum(sizes))
            kept = self._kept[: len(self._unique)]
            begin = 0
            for part in parts:
                before = sum(sizes[: part * each])
                count = sum(sizes[part * each : (part + 1) * each])
                _add(kept, self._unique, self._ids[before : before + count], self.arrived[begin : begin + count])
                begin += count
            if filled:
                kept = self._kept_sums[: len(self._unique)].add_(kept)
            if use.update is None:
                assert use.sums is not None
                use.sums.index_copy_(0, self._unique, kept)
                return
            if use.squares is not None:
                use.squares.append(square_sum(kept))
            if use.edit is not None:
                use.edit(kept)
            use.update(kept, _runs(self._unique.tolist()), False)

        return run


def _elsewhere(weight: Weight) -> Exception:
    return limits.TABLE_ELSEWHERE.error(f"{weight.label} is used in another way in this batch")


def _add(kept: Tensor, rows: Tensor, ids: Tensor, grads: Tensor) -> None:
    """Add a part's gradients, one per token, to what is kept of ``rows``; those of one row are all the same."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    token = torch.empty_like(unique).scatter_(0, inverse, torch.arange(len(ids)))
    places = torch.searchsorted(rows, unique)
    for own, at in zip(torch.split(token, _ADDED), torch.split(places, _ADDED), strict=True):
        kept.index_copy_(0, at, kept.index_select(0, at).add_(grads.index_select(0, own)))


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return ranges


def _between(rows: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the other ones of ``count`` rows as ranges."""
    ends = [0, *(row + 1 for row in rows)]
    return [(begin, end) for begin, end in zip(ends, [*rows, count], strict=True) if begin < end]


def square_sum(grad: Tensor) -> Tensor:
    """Return the sum of squares, fp32."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
    return norm.square_()
