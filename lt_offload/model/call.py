"""A block and what it was called with: enough to run it alone. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from lt_offload.model.compiled import is_compiled
from lt_offload.model.effects import Ambient, within
from lt_offload.schema.profile import COLLECTED_BELOW


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A block and what it was called with."""

    module: nn.Module
    leaves: list[Any]
    """Arguments as ``tree_flatten`` gives them."""
    spec: TreeSpec
    slots: tuple[int, ...]
    """Which leaves are activations."""
    needs_grad: tuple[bool, ...]
    """Per slot."""
    has_backward: bool
    contexts: Ambient
    """In which it was called."""
    reached: set[int]
    """Which of its outputs of numbers a loss has given gradients, as far as that is known; the first one goes on to the
    next block."""

    @property
    def inputs(self) -> list[Tensor]:
        """The activations."""
        return [self.leaves[slot] for slot in self.slots]

    @property
    def compiled(self) -> bool:
        """Whether the block is compiled."""
        return is_compiled(self.module)

    @property
    def passing_bytes(self) -> int:
        """Bytes of gradients that whoever adds up a backward adds to what is measured here."""
        sizes = [parameter.nbytes for parameter in self.module.parameters() if parameter.requires_grad]
        large = [size for size in sizes if size >= COLLECTED_BELOW]
        return sum(sizes) - sum(large) + max(large, default=0)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Call the block on ``inputs``."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, inputs, strict=True):
            leaves[slot] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        with within(self.contexts):
            return self.module(*args, **kwargs)
