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
"""A row has a multiple of so many elements, a cache line of fp32: kernels round what is left over in another way."""

Ranges = Sequence[tuple[int, int]]
"""First row of each, and the row behind its last one; ascending, apart."""


def updates_rows(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether :class:`RowUpdates` does for rows of ``parameter`` what ``optimizer`` does for all of it.

    That is so for ``lt_offload.AdamW``, unless moments have eight bits, and for ``torch.optim.AdamW(fused=True)`` of
    fp32 weights with plain numbers as options.
    """
    group = next((g for g in optimizer.param_groups if any(parameter is own for own in g["params"])), None)
    if group is None or parameter.ndim != 2 or not parameter.is_contiguous():
        return False
    if type(optimizer) is AdamW:
        return bool(parameter.shape[1] % UNIT == 0 and group["state_dtype"] != "8bit")
    return (
        type(optimizer) is torch.optim.AdamW
        and bool(group["fused"])
        and parameter.dtype == torch.float32  # others it rounds as no kernel for single ranges does
        and parameter.shape[1] % UNIT == 0
        and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
        and not any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
    )


class RowUpdates:
    """Updates of some rows of one parameter, with the options of the moment when it is made."""

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
        """Update the rows in ``ranges``, each at most once per step: the first ones of a step, or further ones.

        ``grad`` is the gradient of all rows, or of those in ``ranges`` alone, without gaps.
        """
        # Once per step: counted by every call, later rows would be updated as in later steps.
        if begins:
            state["step"] += 1
        seeds = self._ours.seeds(self._parameter, state, self._group) if self._ours is not None else (None, 0)
        whole = entry_of(weight, grad, state, seeds)
        if not ranges:
            return
        parts = list(_parts(whole, ranges))
        # Of thousands of ranges each would be some tensors, one by one.
        if native.update_ranges(whole, parts, self._options):
            return
        with torch.no_grad():
            plain.update(list(_pieces(whole, parts)), self._options)


def _parts(whole: Entry, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield of each range the first element, how many there are, and where its gradient begins."""
    width, apart = whole.param.shape[1], whole.grad.shape[0] != whole.param.shape[0]
    at = 0
    for first, end in ranges:
        size = (end - first) * width
        yield first * width, size, at if apart else first * width
        at += size


def _pieces(whole: Entry, parts: Sequence[tuple[int, int, int]]) -> Iterator[Entry]:
    grad, shown = whole.grad.view(-1), whole._replace(grad=whole.param)
    for first, size, begin in parts:
        yield plain.piece(shown, first, first + size)._replace(grad=grad[begin : begin + size])
