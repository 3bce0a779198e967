"""Tensors that several blocks use: the output of an encoder, a skip connection. Their gradients, use by use.

Plain PyTorch adds the gradients of such a tensor one by one, beginning with the last use. A block gives the sum of its
own, and adding these sums would be another order of summation. So the sum so far goes through the blocks in the order
of their backwards, and each adds its own to it inside; the block that used the tensor first hands it out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from lt_offload import limits


class RunningTotal:
    """The gradient of one tensor so far."""

    __slots__ = ("first", "gradient", "users")

    def __init__(self, first: int, *, users: int = 1) -> None:
        self.first = first
        """The block that used it first."""
        self.users = users
        """Uses as an argument of a block."""
        self.gradient: Tensor | None = None


class SharedInputs:
    """The tensors of one forward that blocks have been called with."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], RunningTotal]] = {}

    def begin(self) -> None:
        """Begin another forward."""
        self._known.clear()

    def note(self, block: int, inputs: Sequence[Tensor]) -> list[RunningTotal | None]:
        """Return, per input that requires grad, its gradient to come, which it shares with other uses of the tensor."""
        return [self._total(block, tensor) if tensor.requires_grad else None for tensor in inputs]

    def _total(self, block: int, tensor: Tensor) -> RunningTotal:
        # The identity of a tensor that is gone may be another's by now; the reference tells.
        ref, total = self._known.get(id(tensor), (None, None))
        if total is None or ref is None or ref() is not tensor:
            total = RunningTotal(block)
            self._known[id(tensor)] = weakref.ref(tensor), total
        else:
            total.users += 1
        return total

    def check(self) -> None:
        """Raise ``UnsupportedError`` if a backward is over that has not come to the first use of a tensor."""
        for _, total in self._known.values():
            if total.gradient is not None:
                raise limits.SEVERAL_CONSUMERS.error("an input of several blocks has a gradient in only some of them")
