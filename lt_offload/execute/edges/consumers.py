"""Whether the gradients that blocks give their inputs are all that those tensors get, seen as they arrive.

Plain PyTorch adds the gradients of a tensor one by one, in the order of its uses; a block that uses its input more than
once gives their sum. If nobody else uses the tensor, its node receives the very tensor that the block has given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lt_offload import limits


class Consumers:
    """Watches the inputs of an iteration's blocks.

    Args:
        name: of a block, by its index.
        uses: how often a block uses each of its inputs, by its index, once its backward has begun.
    """

    def __init__(self, name: Callable[[int], str], uses: dict[int, Counter[int]]) -> None:
        self._name, self._uses = name, uses
        self._given: dict[tuple[int, int], tuple[int, int]] = {}

    def watch(self, block: int, inputs: Sequence[Tensor]) -> None:
        """See the gradients of what ``block`` is about to be called with, before hooks of users change them."""
        for slot, tensor in enumerate(inputs):
            if tensor.requires_grad and torch.is_grad_enabled():
                users = dict(tensor._backward_hooks or {})
                tensor.register_hook(partial(self._arrived, block, slot))  # type: ignore[no-untyped-call]
                for key, hook in users.items():  # autograd goes by the order of insertion alone
                    del tensor._backward_hooks[key]  # type: ignore[union-attr]
                    tensor._backward_hooks[key] = hook  # type: ignore[index]

    def given(self, block: int, gradients: Sequence[Tensor | None]) -> None:
        """Note what the backward of ``block`` has found, per input."""
        found = enumerate(gradients)
        self._given.update(((block, slot), _identity(grad)) for slot, grad in found if grad is not None)

    def _arrived(self, block: int, slot: int, gradient: Tensor) -> None:
        given = self._given.pop((block, slot), None)
        if given is not None and self._uses[block][slot] > 1 and _identity(gradient) != given:
            raise limits.SEVERAL_CONSUMERS.error(f"the input of block {self._name(block)} is used in several places")


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Return what differs once something was added to ``tensor``, or ``tensor`` to something; it must be alive."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata, tensor._version
