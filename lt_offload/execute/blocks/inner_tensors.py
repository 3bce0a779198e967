"""Tensors from inside a block that its run leaves in attributes, where a loss may find them.

In plain PyTorch they are part of the graph. Here the block runs without one: they would be constants, and a loss that
uses one would lose its gradient without a word. So those that would require grad do, through a node that refuses to be
reached. Whether they would is seen when the block is recomputed with a graph; until then a tensor in a new location is
taken to require grad, and the plain tensor is put back if it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload import limits
from lt_offload.model.state.effects import Location, Snapshot


class _Sentinel(torch.autograd.Function):
    """The node of a tensor that no gradient may reach."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor], reached: Callable[[], None]) -> Tensor:
        ctx.reached = reached
        # Out of a list, where autograd has not seen it: an argument that is returned comes back as a view of itself.
        return box.pop()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.reached()
        return None, None, None


@dataclass(slots=True)
class _Marked:
    """One location whose tensors have sentinels."""

    location: Location
    plain: Any
    """The value that the run has left."""
    made: Any
    """The same with sentinels, which is there now."""
    reached: bool = False


class InnerTensors:
    """The tensors that one run of a block has left in attributes."""

    def __init__(self, block: str, run: Snapshot, anchor: Tensor) -> None:
        self._block, self._graded = block, run.graded  # not the run itself: it holds copies of the state before it
        self._known = dict(run.graded)
        self._marked: list[_Marked] = []
        made: dict[int, Tensor] = {}
        for location in run.locations():
            # Before anything is known of the block, the profile's first pass has just seen it, with gradients.
            if self._known.get(location.owner, bool(self._known)):
                self._mark(location, anchor, made)

    def _mark(self, location: Location, anchor: Tensor, made: dict[int, Tensor]) -> None:
        plain = location.value
        marked = _Marked(location, plain, plain)

        def reached() -> None:
            marked.reached = True
            if self._graded.get(location.owner):
                raise self._refusal()

        def one(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.requires_grad:
                return tensor
            if id(tensor) not in made:
                with torch.enable_grad():
                    made[id(tensor)] = _Sentinel.apply(anchor, [tensor.detach()], reached)  # type: ignore[no-untyped-call]
            return made[id(tensor)]

        marked.made = tuple(map(one, plain)) if isinstance(plain, tuple) else one(plain)
        location.put(marked.made)
        self._marked.append(marked)

    def recomputed(self) -> None:
        """Compare with what a run with a graph has left; refuses losses that have used, or may have used, a tensor."""
        graded = self._graded
        for marked in self._marked:
            if graded.get(marked.location.owner):
                if marked.reached:
                    raise self._refusal()
            elif marked.location.holds(marked.made):
                marked.location.put(marked.plain)
        if any(graded.get(owner) for owner, before in self._known.items() if not before):
            raise self._refusal()
        for marked in self._marked:  # its node holds it: a cycle, which the tensors must not wait for
            marked.plain = marked.made = None
        self._marked = []

    def _refusal(self) -> Exception:
        return limits.INNER_TENSOR.error(f"the loss uses a tensor from inside block {self._block}")
