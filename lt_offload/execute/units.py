"""One block's run as an autograd function of its own. Knows options and saved tensors; no plan, no other blocks.

The block's graph is private: outside it, autograd sees one node per block. That node's backward finds (or rebuilds) the
private graph, runs it, and returns the gradients that arrived at the block's inputs. Parameters get their gradients
inside, where the engine's hooks pick them up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

from lt_offload.execute.activations import CacheCostly, Moved, Pager, ReplayCostly, SavedTensors
from lt_offload.execute.device import Device
from lt_offload.execute.params import Weight
from lt_offload.execute.pools import HostPool
from lt_offload.profile.options import is_activation
from lt_offload.profile.types import OptionName


class Frame:
    """What one forward leaves for its backward."""

    def __init__(
        self,
        *,
        device: Device,
        pool: HostPool,
        index: int,
        label: str,
        option: OptionName,
        forward: Callable[..., Any],
        weights: Sequence[Weight],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.device = device
        self.index = index
        self.option = option
        self.forward = forward
        self.weights = weights
        self.pager = Pager(device, pool, label) if option in ("offload", "mixed") else None
        self.done = False
        self._leaves, self._spec = tree_flatten((args, kwargs))
        positional = len(tree_flatten(args)[0])
        self._slots = [
            at
            for at, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and is_activation(leaf, positional=at < positional)
        ]
        self._needs_grad = [self._leaves[at].requires_grad for at in self._slots]
        self._shared = [
            leaf for at, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and at not in self._slots
        ]
        self._inputs: list[Tensor | Moved] = []
        self._rng: list[Tensor] = []
        self._cache: CacheCostly | None = None
        self._roots: list[GradientEdge | None] = []
        self._input_grads: list[Tensor | None] = [None] * len(self._slots)
        self._out: list[Any] = []
        self._out_slots: list[int] = []
        self._out_spec: TreeSpec | None = None

    @property
    def needs_backward(self) -> bool:
        """Whether a gradient can reach the block's weights or inputs."""
        return any(self._needs_grad) or any(weight.param.requires_grad for weight in self.weights)

    def take_inputs(self) -> list[Tensor]:
        """Return the activation inputs and forget them: whoever needs them later saves them."""
        inputs = [self._leaves[at] for at in self._slots]
        for at in self._slots:
            self._leaves[at] = None
        return inputs

    def run(self, anchor: Tensor, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward. Return the output tensors, detached, and those among them that no gradient can reach."""
        if self.option in ("keep", "offload"):
            with torch.enable_grad(), SavedTensors(self.weights, self.pager, self._shared):
                out = self._call(self._enter(anchor, inputs))
        else:
            self._rng = self.device.rng_state()
            with torch.no_grad(), ExitStack() as stack:
                if self.option == "mixed":
                    assert self.pager is not None
                    self._cache = stack.enter_context(CacheCostly(self.pager))
                out = self._call(inputs)
            self._inputs = [self.pager.take(x) if self.pager else x for x in inputs]
        self._out, self._out_spec = tree_flatten(out)
        self._out_slots = [at for at, leaf in enumerate(self._out) if isinstance(leaf, Tensor)]
        tensors = [self._out[at] for at in self._out_slots]
        for at in self._out_slots:
            self._out[at] = None
        if self.option in ("keep", "offload"):
            self._roots = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
            unreached = [not t.requires_grad for t in tensors]
        else:
            unreached = [not t.is_floating_point() for t in tensors]
        detached = [t.detach() for t in tensors]
        return detached, [t for t, dead in zip(detached, unreached, strict=True) if dead]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the block's output structure with ``tensors`` in place."""
        assert self._out_spec is not None
        for at, tensor in zip(self._out_slots, tensors, strict=True):
            self._out[at] = tensor
        out = tree_unflatten(self._out, self._out_spec)
        self._out = []
        return out

    def backward(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward, rebuilding the graph if need be; return the gradients of the activation inputs."""
        roots: Sequence[GradientEdge | Tensor | None] = self._roots
        if self.option in ("recompute", "mixed"):
            roots = self._rebuild(anchor)
        pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root is not None and grad is not None]
        self._roots = []
        del roots
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])  # type: ignore[arg-type]
        found, self._input_grads = self._input_grads, []
        self.close()
        return found

    def close(self) -> None:
        """Let go of everything that was saved."""
        self.done = True
        self._inputs, self._roots, self._cache, self._leaves, self._shared = [], [], None, [], []
        if self.pager is not None:
            self.pager.close()

    def catch(self, slot: int, grad: Tensor) -> None:
        """Remember the gradient of an activation input."""
        self._input_grads[slot] = grad

    def _rebuild(self, anchor: Tensor) -> list[Tensor | None]:
        inputs = [x.restore() if isinstance(x, Moved) else x for x in self._inputs]
        self._inputs = []
        now = self.device.rng_state()
        self.device.set_rng_state(self._rng)
        with torch.enable_grad(), SavedTensors(self.weights, None, self._shared), ExitStack() as stack:
            entered = self._enter(anchor, inputs)
            del inputs
            if self._cache is not None:
                stack.enter_context(ReplayCostly(self._cache))
            out = self._call(entered)
        self.device.set_rng_state(now)
        return [t if t.requires_grad else None for t in tree_flatten(out)[0] if isinstance(t, Tensor)]

    def _enter(self, anchor: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [
            _Entry.apply(anchor, x, self, slot) if need else x  # type: ignore[no-untyped-call]
            for slot, (x, need) in enumerate(zip(inputs, self._needs_grad, strict=True))
        ]

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        leaves = list(self._leaves)
        for at, tensor in zip(self._slots, inputs, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self.forward(*args, **kwargs)


class _Entry(torch.autograd.Function):
    """Where the private graph begins: passes the input on and catches its gradient, holding on to neither."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, x: Tensor, frame: Frame, slot: int) -> Tensor:
        ctx.frame, ctx.slot = weakref.ref(frame), slot  # the frame holds this graph: no cycle
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None]:
        frame = ctx.frame()
        assert frame is not None
        frame.catch(ctx.slot, grads[0])
        return None, None, None, None


class BlockFunction(torch.autograd.Function):
    """One block in the outer graph; ``anchor`` requires grad, for blocks that train on frozen inputs."""

    @staticmethod
    @override
    def forward(ctx: Any, frame: Frame, anchor: Tensor, backward: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.frame, ctx.anchor, ctx.run = frame, anchor, backward
        ctx.set_materialize_grads(False)
        out, unreached = frame.run(anchor, [x.detach() for x in inputs])
        ctx.mark_non_differentiable(*unreached)
        return tuple(out)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = ctx.run(ctx.frame, ctx.anchor, grads)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(grad if need else None for grad, need in zip(found, needed, strict=True))
