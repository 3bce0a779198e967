"""Runs of blocks in a step that is only measured: each with a graph of its own, which goes when it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import tree_flatten, tree_map, tree_unflatten
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import BlockNode, EntryNode
from lt_offload.model.parts import Cutter, in_parts
from lt_offload.model.state.contexts import ambient, within


class ApartRuns:
    """Joins blocks to an outer graph whose backward ends at them, so that activations of one block at most are kept.

    ``first`` is called when the backward comes to the first block.
    """

    def __init__(self, structure: Structure, first: Callable[[], object]) -> None:
        self._structure, self._first = structure, first
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(
        self,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        body: Callable[..., Any],
        *,
        cutter: Cutter | None,
        again: Callable[..., Any] | None,
        reached: Callable[[int], None],
    ) -> Any:
        """Run a block; the arguments are those of ``Survey.forward`` in ``execute/training/survey.py``."""
        # First of all: hooks for saved tensors would already be called in the run below.
        limits.check_call(self._structure.blocks[index].name, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        del args, kwargs
        entered = [self._enter(index, leaf) for leaf in leaves]
        leaves.clear()
        args, kwargs = tree_unflatten(entered, spec)
        entered.clear()
        with within(ambient()):  # no cast of a weight outlives its block
            out = (body if cutter is None else in_parts(body, cutter))(*args, **kwargs)
        del args, kwargs
        numbers = iter(range(1 << 30))

        def connect(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            number = next(numbers)
            if not leaf.requires_grad:
                return leaf.detach()
            # In a list, as a tensor that a function returns as it came would become a view of an argument.
            box = [leaf.detach()]
            return _Interface.apply(self._anchor, box, index, lambda _: reached(number), self._first)  # type: ignore[no-untyped-call]

        return tree_map(connect, out)

    def _enter(self, index: int, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return _PrivateEntry.apply(self._anchor, leaf.detach(), index)  # type: ignore[no-untyped-call]
        return leaf


class _Interface(BlockNode):
    """The node of a block in the outer graph: unlike a leaf, it does not hold the block's output."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        anchor: Tensor,
        box: list[Tensor],
        index: int,
        reached: Callable[[int], None],
        first: Callable[[], object],
    ) -> Tensor:
        ctx.index, ctx.reached, ctx.first = index, reached, first
        return box.pop()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        ctx.first()  # while the gradient is there with which the block's backward begins
        ctx.reached(0)
        return (None,) * 5


class _PrivateEntry(EntryNode):
    """The node of an activation in the graph of a block."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, x: Tensor, index: int) -> Tensor:
        ctx.block = index
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * 3
