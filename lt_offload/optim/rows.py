"""AdamW for some rows of a matrix at a time, with the bits of an update of the whole.

Arithmetic is element by element; what may differ is where a kernel's last vector ends. Rows of whole cache lines have
no such rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_offload.optim import native, plain
from lt_offload.optim.adamw import AdamW, entry_of, options_of
from lt_offload.optim.plain import Entry

UNIT = 16
"""A row has a multiple of so many elements: our kernel rounds what is left over in another way."""
_CACHE_LINE = 64
"""Bytes; a row has a multiple of so many where torch's kernel updates it, for the same reason."""
_BLOCK = 1 << 22
"""Elements of a table that are updated in one go, where single ranges would be thousands of calls of a kernel: what is
put aside meanwhile takes some megabytes."""

Ranges = Sequence[tuple[int, int]]
"""First row of each, and the row behind its last one; ascending, apart."""


def updates_rows(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether :class:`RowUpdates` does for rows of ``parameter`` what ``optimizer`` does for all of it.

    That is so for ``lt_offload.AdamW``, unless moments have eight bits, and for ``torch.optim.AdamW(fused=True)`` with
    plain numbers as options.
    """
    group = next((g for g in optimizer.param_groups if any(parameter is own for own in g["params"])), None)
    if group is None or parameter.ndim != 2 or not parameter.is_contiguous():
        return False
    if type(optimizer) is AdamW:
        return bool(parameter.shape[1] % UNIT == 0 and group["state_dtype"] != "8bit")
    return (
        type(optimizer) is torch.optim.AdamW
        and bool(group["fused"])
        and parameter.shape[1] * parameter.element_size() % _CACHE_LINE == 0
        and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
        and not any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
    )


class RowUpdates:
    """Updates of some rows of one parameter, with the options of the moment when it is made.

    Args:
        optimizer: one for which :func:`updates_rows` holds.
        parameter: of the optimizer.
        group: its options.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> None:
        self._ours = optimizer if isinstance(optimizer, AdamW) else None
        self._parameter, self._group = parameter, group
        lr, scale = group["lr"], self._ours.grad_scale if self._ours is not None else 1.0
        self._options = options_of({**group, "lr": lr.clone() if isinstance(lr, Tensor) else lr}, scale)

    def new_state(self, weight: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that has not been updated yet, whose value is ``weight``."""
        if self._ours is not None:
            return self._ours.new_state(weight, dict(self._group))
        zeros = (torch.zeros_like(weight, memory_format=torch.preserve_format) for _ in range(2))
        return {"step": torch.tensor(0.0), **dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))}

    def run(self, weight: Tensor, grad: Tensor, state: dict[str, Any], ranges: Ranges, *, begins: bool) -> None:
        """Update the rows in ``ranges``.

        Args:
            weight: the parameter's value, where it is to be changed.
            grad: the gradient of all rows, or of those in ``ranges`` alone, without gaps.
            state: of the parameter, which is changed.
            ranges: rows, each at most once per step.
            begins: whether these are the first rows of a step.
        """
        # Once per step: counted by every call, later rows would be updated as in later steps.
        if begins:
            state["step"] += 1
        seeds = self._ours.seeds(self._parameter, state, self._group) if self._ours is not None else (None, 0)
        whole = entry_of(weight, grad, state, seeds)
        if not ranges:
            return
        if self._ours is None and weight.dtype != torch.float32:
            self._run_blocks(whole, ranges)
            return
        parts = list(_parts(whole, ranges))
        # Of thousands of ranges each would be some tensors, one by one.
        if native.update_ranges(whole, parts, self._options):
            return
        with torch.no_grad():
            plain.update(list(_pieces(whole, parts)), self._options)

    def _run_blocks(self, whole: Entry, ranges: Ranges) -> None:
        """Update rows with torch's own kernel, which rounds low precision as ours does not."""
        rows = torch.cat([torch.arange(*each) for each in ranges])
        height, width = whole.param.shape
        size = max(1, _BLOCK // width)
        with torch.no_grad():
            if whole.grad.shape[0] != height:
                for at in range(0, len(rows), size):
                    self._run_gathered(whole, rows[at : at + size], whole.grad[at : at + size])
                return
            firsts = range(0, height, size)
            ends = torch.searchsorted(rows, torch.tensor([*firsts, height])).tolist()  # rows ascend
            for first, begin, end in zip(firsts, ends, ends[1:], strict=False):
                self._run_among(whole, rows[begin:end], first, min(first + size, height))

    def _run_gathered(self, whole: Entry, rows: Tensor, grad: Tensor) -> None:
        """Update ``rows``, whose gradient is apart, in a copy."""
        copies = [tensor.index_select(0, rows) for tensor in _changed(whole)]
        self._run_torch(whole, copies, grad)
        _put(whole, rows, copies)

    def _run_among(self, whole: Entry, rows: Tensor, first: int, end: int) -> None:
        """Update ``rows`` of those from ``first`` to ``end``: all of these, and then the others are what they were."""
        if not len(rows):
            return
        others = torch.ones(end - first, dtype=torch.bool)
        others[rows - first] = False
        kept = first + torch.nonzero(others).view(-1)
        before = [tensor.index_select(0, kept) for tensor in _changed(whole)]
        self._run_torch(whole, [tensor[first:end] for tensor in _changed(whole)], whole.grad[first:end])
        _put(whole, kept, before)

    def _run_torch(self, whole: Entry, changed: Sequence[Tensor], grad: Tensor) -> None:
        param, exp_avg, exp_avg_sq = changed
        part = whole._replace(param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        plain.update([part], self._options)


def _changed(entry: Entry) -> tuple[Tensor, Tensor, Tensor]:
    """Return what an update changes, where there are no copies in fp32."""
    return entry.param, entry.exp_avg, entry.exp_avg_sq


def _put(entry: Entry, rows: Tensor, values: Sequence[Tensor]) -> None:
    for tensor, value in zip(_changed(entry), values, strict=True):
        tensor.index_copy_(0, rows, value)


def _parts(whole: Entry, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield of each range the first element, how many there are, and where its gradient begins."""
    width, apart = whole.param.shape[1], whole.grad.shape[0] != whole.param.shape[0]
    at = 0
    for first, end in ranges:
        size = (end - first) * width
        yield first * width, size, at if apart else first * width
        at += size


def _pieces(whole: Entry, parts: Sequence[tuple[int, int, int]]) -> Iterator[Entry]:
    """Yield the parts as entries."""
    grad, shown = whole.grad.view(-1), whole._replace(grad=whole.param)
    for first, size, begin in parts:
        yield plain.piece(shown, first, first + size)._replace(grad=grad[begin : begin + size])
