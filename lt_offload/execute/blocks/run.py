"""One block's run as an autograd function: a private graph inside, one node in the graph outside.

That node's backward finds (or rebuilds) the private graph, runs it, and returns the gradients that arrived at the
block's inputs. Parameters get their gradients inside, where the engine's hooks pick them up.

Between its forward and its backward a block may be recomputed any number of times, each time replacing what it has
saved. The outer graph holds neither inputs nor outputs of a block, so what a frame lets go of is free.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import TreeSpec, backward_class_of, top_saved_tensors_hooks, tree_flatten, tree_unflatten
from lt_offload.errors import UnsupportedError
from lt_offload.execute.blocks.inner_tensors import InnerTensors
from lt_offload.execute.blocks.repeats import Repeats
from lt_offload.execute.blocks.shared_inputs import RunningTotal
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.activations import (
    ActivationOffloader,
    HostPool,
    Moved,
    SavedTensors,
    given_back,
)
from lt_offload.execute.memory.tensors import Weight
from lt_offload.model.calls import edges, tensors_of
from lt_offload.model.saving import CacheCostly, ReplayCostly, is_activation, travels
from lt_offload.model.snapshot import version
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.effects import Effects, Snapshot
from lt_offload.schema.plan import Save
from lt_offload.schema.profile import RECORDED, OptionName

TRAVELLING: tuple[OptionName, ...] = ("offload", "mixed", "reload")
"""Options with which something is copied to the host between forward and backward."""


class Frame:
    """What one forward leaves behind for its backward, and for being recomputed before that.

    A *slot* is the position of an activation among the leaves of the call's arguments.
    """

    def __init__(
        self,
        *,
        device: Device,
        pool: HostPool,
        index: int,
        label: str,
        name: str,
        option: OptionName,
        forward: Callable[..., Any],
        weights: Sequence[Weight],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recomputed: bool = False,
        steady: bool = False,
        graphed: bool = False,
        effects: Effects | None = None,
        buffers: Sequence[Tensor] = (),
        uses: dict[int, Counter[int]] | None = None,
        offloader: ActivationOffloader | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self.device = device
        self.index = index
        self.name = name
        self.option = option
        self.forward = forward
        self.weights = weights
        self._lent = offloader is not None
        """Other parts of the batch use the offloader, too, so that it is not closed here."""
        self.offloader = offloader
        if offloader is None and option in TRAVELLING:
            self.offloader = ActivationOffloader(device, pool, label)
        self.done = False
        self.forgotten = False
        """Another forward has begun, for which it was closed."""
        self.recomputed = recomputed
        """The plan recomputes the block before its backward, whatever its option."""
        self.steady = steady
        """Its weights stay at one address from the forward to the backward."""
        self.graphed = graphed
        """It always runs with a graph: without one torch would run other code, perhaps with other last bits."""
        self._effects = effects
        self._uses = uses
        """By block, how often it uses each of its inputs; counted in its first backward."""
        self._ambient = ambient()
        self._before: Snapshot | None = None
        """State that the first run has changed, as it was before."""
        self._inner: InnerTensors | None = None
        self._in_backward = False
        self.sources: tuple[int, ...] | None = None
        """Per activation input, which output of the previous block it is; None if one of them is something else."""
        self._leaves, self._spec = tree_flatten((args, kwargs))
        positional = _positional(self._spec)
        self._slots = [
            slot
            for slot, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and is_activation(leaf, positional=slot < positional)
        ]
        self._needs_grad = [self._leaves[slot].requires_grad for slot in self._slots]
        self._shared = [
            leaf for slot, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and slot not in self._slots
        ]
        """Masks and tables that all blocks are given: they stay on the device."""
        self._shared_versions = [version(x) for x in self._shared]
        self._buffers = buffers
        """Of the block's modules: they are on the device anyway, so that sending them away would free nothing."""
        self._repeats = repeats
        self._sums: list[Tensor] | None = None
        """Tell the outputs of the first run, if its second one is to be compared."""
        self._inputs: list[Tensor | Moved] | None = None
        """Saved, to recompute from."""
        self._versions: list[int] = []
        """Of the inputs, before the forward."""
        self._rng: list[Tensor] = []
        self._cache: CacheCostly | None = None
        self._roots: list[GradientEdge | None] | None = None
        """Where the private graph ends, by output. Edges and not tensors, which would keep the outputs alive."""
        self._entries: list[GradientEdge | None] = []
        """Where the private graph begins, by input."""
        self.totals: list[RunningTotal | None] = []
        """By input, the gradient of what others may use, too."""
        self._input_grads: list[Tensor | None] = [None] * len(self._slots)
        self._out: list[Any] = []
        self._out_slots: list[int] = []
        self._out_spec: TreeSpec | None = None

    @property
    def _is_first(self) -> bool:
        """Whether its input is part of the batch, which stays for the whole iteration anyway."""
        return self.index == 0 and self.recomputed

    @property
    def needs_backward(self) -> bool:
        """Whether a gradient can reach the block's weights or inputs."""
        return any(self._needs_grad) or any(weight.param.requires_grad for weight in self.weights)

    @property
    def inputs(self) -> list[Tensor]:
        """The activation inputs, until they have been taken."""
        return [self._leaves[slot] for slot in self._slots]

    def take_inputs(self) -> list[Tensor]:
        """Return the activation inputs and forget them: whoever needs them later saves them."""
        inputs = self.inputs
        for slot in self._slots:
            self._leaves[slot] = None
        return inputs

    def run(self, anchor: Tensor, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward. Return the output tensors, detached, and those among them that no gradient can reach."""
        recorded = self.option in RECORDED
        if recorded:
            out = self._record(anchor, inputs, self.offloader, steady=self.steady)
        else:
            with ExitStack() as stack:
                self._note_first(stack)
                if self.option == "mixed":
                    assert self.offloader is not None and not self.graphed
                    self._cache = stack.enter_context(CacheCostly(self.offloader.keep))
                versions = [version(x) for x in inputs]
                out = self._run_unrecorded(anchor, inputs)
            self._note_outputs(out)
            self._save(inputs, versions)
            if self._before is not None:
                self._inner = InnerTensors(self.name, self._before, anchor)
        self._out, self._out_spec = tree_flatten(out)
        self._out_slots = [slot for slot, leaf in enumerate(self._out) if isinstance(leaf, Tensor)]
        tensors = [self._out[slot] for slot in self._out_slots]
        for slot in self._out_slots:
            self._out[slot] = None
        # Without a graph nothing says which outputs depend on what is trained: all numbers might.
        unreached = [not (t.requires_grad if recorded or self.graphed else t.is_floating_point()) for t in tensors]
        detached = [t.detach() for t in tensors]
        return detached, [t for t, dead in zip(detached, unreached, strict=True) if dead]

    def run_frozen(self, *, save: bool = False) -> Any:
        """Run the forward of a block that no gradient can reach; return its output. ``save``: keep its inputs."""
        inputs = self.take_inputs()
        with ExitStack() as stack:
            if self.recomputed:
                self._note_first(stack)
                self._inputs = [*inputs] if self._is_first or save else None
                self._versions = [version(x) for x in inputs]
            stack.enter_context(torch.set_grad_enabled(self.graphed))
            out = self._call(inputs)
        if self.recomputed:
            self._note_outputs(out)
        return out

    def _note_outputs(self, out: Any) -> None:
        if self._repeats is not None:
            self._sums = self._repeats.sums(tensors_of(out))

    def check_outputs(self, out: Any) -> None:
        """Compare what a second run has returned with what the first did.

        Raises:
            UnsupportedError: if its numbers are others.
        """
        if self._repeats is not None:
            self._repeats.compare(self.name, self._sums, tensors_of(out))

    def _note_first(self, stack: ExitStack) -> None:
        """Remember what the first run, within ``stack``, sees and changes, for the runs that repeat it."""
        if self._ambient.modes:
            raise limits.MODES.error(f"{self._ambient.modes[-1]} around block {self.name}")
        # Before anything is drawn: dropout has to draw the same masks when the block is recomputed.
        self._rng = self.device.rng_state()
        if self._effects is not None:
            self._before = stack.enter_context(self._effects.first_run())

    @property
    def runs(self) -> int:
        """How often the block runs forward."""
        return 1

    @property
    def slots(self) -> list[int]:
        """The positions of the activations among the leaves of the call's arguments."""
        return self._slots

    def other_outputs(self) -> tuple[list[Any], TreeSpec | None]:
        """Return what the forward has returned beside tensors, and the structure of its output."""
        return [leaf for slot, leaf in enumerate(self._out) if slot not in self._out_slots], self._out_spec

    def can_recompute(self, outputs: Sequence[Tensor] | None) -> bool:
        """Return whether its input is at hand: saved, or among the previous block's outputs, recomputed just now."""
        return not self._slots or self._inputs is not None or (outputs is not None and self.sources is not None)

    def recompute(self, anchor: Tensor, outputs: list[Tensor] | None, save: Save) -> list[Tensor]:
        """Run the forward as it ran first, let go of what was saved and save something else; return the outputs.

        Args:
            anchor: requires grad.
            outputs: what the previous block has returned, if it was recomputed just now; is emptied, so that nobody
                holds what the block does not need.
            save: what to save.
        """
        assert self.can_recompute(outputs)
        inputs = self._take_saved()
        if inputs is None:
            inputs = [outputs[position] for position in self.sources] if outputs and self.sources else []
        if outputs is not None:
            outputs.clear()
        self.release()
        self._versions = [version(x) for x in inputs]
        graph = save == "all"
        with self._as_first(graph=graph):
            if graph:
                out = self._record(anchor, inputs, None, steady=self.steady)
            else:
                out = self._run_unrecorded(anchor, inputs)
        self.check_outputs(out)
        if graph and self._inner is not None:
            self._inner.recomputed()
        if save == "input" or self._is_first:
            self._inputs = [*inputs]
        return [t.detach() for t in tensors_of(out)]

    @contextmanager
    def repeated(self, outputs: Sequence[Tensor], *, graph: bool) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Enclose another run of the call by somebody else, who sees and draws what this one did; yields its arguments.

        Args:
            outputs: what the previous block has returned, having run again just now.
            graph: whether that run keeps a graph.
        """
        inputs = self._take_saved()
        if inputs is None:
            inputs = [outputs[position] for position in self.sources or ()]
        leaves = list(self._leaves)
        for slot, tensor, need in zip(self._slots, inputs, self._needs_grad, strict=True):
            leaves[slot] = tensor.detach().requires_grad_(need)
        args, kwargs = tree_unflatten(leaves, self._spec)
        with self._as_first(graph=graph), within(self._ambient):
            yield args, kwargs

    def end(self) -> None:
        """Let go of everything, after that other run's backward."""
        if self._inner is not None:
            self._inner.recomputed()
        self.close()

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the block's output structure with ``tensors`` in place."""
        assert self._out_spec is not None
        for slot, tensor in zip(self._out_slots, tensors, strict=True):
            self._out[slot] = tensor
        out = tree_unflatten(self._out, self._out_spec)
        self._out = []
        return out

    def backward(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward, rebuilding the graph if need be; return the gradients of the activation inputs."""
        if self._roots is None:
            self._rebuild(anchor)
        roots, self._roots, self._inputs = self._roots or [], None, None
        if self._uses is not None and self.index not in self._uses:
            self._uses[self.index] = _count_uses([root.node for root in roots if root is not None])
        pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root is not None and grad is not None]
        del roots  # an output that the loss does not use must not keep its part of the graph alive
        shared = [(slot, total) for slot, total in enumerate(self.totals) if total is not None and total.users > 1]
        for slot, total in shared:
            entry = self._entries[slot]
            if total.gradient is not None and entry is not None:
                pairs.append((entry, total.gradient))
                total.gradient = None
        if pairs:
            # Nested in the outer backward, on its thread. Not autograd.grad: parameters' hooks have to fire one by one,
            # so that each gradient leaves as soon as it is complete.
            self._in_backward = True
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
            self._in_backward = False
        gradients, self._input_grads = self._input_grads, []
        for slot, total in shared:
            if total.first != self.index:
                total.gradient, gradients[slot] = gradients[slot], None
        self.close()
        return gradients

    def close(self) -> None:
        """Let go of everything that was saved."""
        self.done = True
        self.release()
        self._leaves, self._shared, self._before, self._inner = [], [], None, None

    def release(self) -> None:
        """Let go of saved inputs, results and graph."""
        self._inputs, self._roots, self._cache, self._entries = None, None, None, []
        if self.offloader is not None and not self._lent:
            self.offloader.close()

    def catch(self, slot: int, grad: Tensor) -> None:
        """Remember the gradient of an activation input.

        Raises:
            UnsupportedError: if it comes by another way than the block's outputs.
        """
        if not self._in_backward:
            raise limits.INNER_TENSOR.error(f"the loss uses a tensor from inside block {self.name}")
        self._input_grads[slot] = grad

    def _rebuild(self, anchor: Tensor) -> None:
        inputs = self._take_saved()
        assert inputs is not None or not self._slots, f"block {self.name} has saved nothing to run its backward from"
        with self._as_first(graph=True):
            self.check_outputs(self._record(anchor, inputs or [], None, steady=True))
        if self._inner is not None:
            self._inner.recomputed()

    def _record(
        self, anchor: Tensor, inputs: Sequence[Tensor], offloader: ActivationOffloader | None, *, steady: bool
    ) -> Any:
        """Run the forward and keep its graph; what it saves travels with ``offloader`` if there is one.

        Without an offloader the graph may hold the weights themselves if they are ``steady``: at the same address
        until the graph has been used.
        """
        with torch.enable_grad(), ExitStack() as stack:
            # Hooks of others (torch.utils.checkpoint's around the block) would throw away what the graph saves.
            if offloader is not None or not steady or top_saved_tensors_hooks(True):
                stack.enter_context(SavedTensors(self.weights, offloader, [*self._shared, *self._buffers]))
            entered = self._enter(anchor, inputs)
            del inputs  # only the graph holds them from here on, so that what travels is free once it has left
            self._entries = [get_gradient_edge(x) if x.requires_grad else None for x in entered]
            if self._cache is not None:
                stack.enter_context(ReplayCostly(self._cache, given_back, limits.OTHER_SECOND_RUN.error))
            out = self._call(entered)
        self._roots = [get_gradient_edge(t) if t.requires_grad else None for t in tensors_of(out)]
        return out

    def _run_unrecorded(self, anchor: Tensor, inputs: Sequence[Tensor]) -> Any:
        """Run the forward; whatever graph it builds ends with its outputs."""
        with torch.set_grad_enabled(self.graphed):
            return self._call(self._enter(anchor, inputs) if self.graphed else inputs)

    def _save(self, inputs: Sequence[Tensor], versions: list[int]) -> None:
        """Save the input, as it was before the forward, in the way of the option."""
        self._versions = versions
        self._check_untouched(inputs)
        if self.option == "recompute":
            self._inputs = list(inputs)
        elif self.option != "discard":
            assert self.offloader is not None
            moves = [self.option == "mixed" or travels(x) for x in inputs]
            take = self.offloader.take
            self._inputs = [take(x, watch=True) if move else x for x, move in zip(inputs, moves, strict=True)]

    def _take_saved(self) -> list[Tensor] | None:
        """Return the saved input, which is no longer saved then."""
        saved, self._inputs = self._inputs, None
        if saved is None:
            return None
        self._check_untouched(saved)
        return [x.restore() if isinstance(x, Moved) else x for x in saved]

    def _check_untouched(self, inputs: Sequence[Tensor | Moved]) -> None:
        # Autograd compares versions of what its graphs save. These inputs are in no graph, so that is done here.
        for x, known in zip(inputs, self._versions, strict=True):
            if isinstance(x, Tensor) and version(x) != known:
                raise UnsupportedError(
                    f"the input of block {self.name} was written to after the block was called with it, so that the "
                    "block cannot run again; write out of place"
                )

    def _check_unwritten(self) -> None:
        """Refuse a second run where masks, tables or buffers were written to since the first one."""
        for x, known in zip(self._shared, self._shared_versions, strict=True):
            if version(x) != known:
                raise limits.REWRITTEN.error(f"an argument of block {self.name}, {list(x.shape)} of {x.dtype}")
        buffer = self._before.rest.rewritten() if self._before is not None else None
        if buffer is not None:
            raise limits.REWRITTEN.error(f"buffer {buffer} of block {self.name}")

    @contextmanager
    def _as_first(self, *, graph: bool) -> Iterator[None]:
        """Let the block see and draw what it did in its first run, and leave nothing behind."""
        self._check_unwritten()
        # The generators go back to where they are: the next draw of the model is to be that of plain PyTorch.
        now = self.device.rng_state()
        self.device.set_rng_state(self._rng)
        try:
            with self._before.restored(graph=graph) if self._before is not None else nullcontext():
                yield
        finally:
            self.device.set_rng_state(now)

    def _enter(self, anchor: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [
            _BlockEntry.apply(anchor, x, self, slot) if need else x  # type: ignore[no-untyped-call]
            for slot, (x, need) in enumerate(zip(inputs, self._needs_grad, strict=True))
        ]

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        leaves = list(self._leaves)
        for slot, tensor in zip(self._slots, inputs, strict=True):
            leaves[slot] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        # A backward runs outside the contexts of the first call, and on CUDA on another thread.
        if self._ambient == ambient() and not self._ambient.autocasts:
            return self.forward(*args, **kwargs)
        with within(self._ambient):
            return self.forward(*args, **kwargs)


def _count_uses(roots: Sequence[Any]) -> Counter[int]:
    """Return how often each activation input is used in the private graph below ``roots``, by its slot."""
    ends = [*roots, *(node for node, _ in edges(roots))]
    return Counter(node.slot for node in ends if isinstance(node, backward_class_of(_BlockEntry)))


def _positional(spec: TreeSpec) -> int:
    """Return how many leaves of ``(args, kwargs)`` belong to ``args``."""
    return spec.child(0).num_leaves


class _BlockEntry(torch.autograd.Function):
    """Where the private graph begins: passes the input on and catches its gradient, holding on to neither."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, x: Tensor, frame: Frame, slot: int) -> Tensor:
        # The frame holds this graph. A reference back would close a cycle through C++, which Python's collector does
        # not see: every iteration's activations would stay.
        ctx.frame, ctx.slot = weakref.ref(frame), slot
        return x.view_as(x)  # an output of its own: the graph begins at this node and not at the input

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None]:
        frame = ctx.frame()
        assert frame is not None
        frame.catch(ctx.slot, grads[0])
        return None, None, None, None


class BlockFunction(torch.autograd.Function):
    """One block in the outer graph.

    ``anchor`` requires grad, so that a block has a backward even if none of its inputs does (LoRA's first block).
    """

    @staticmethod
    @override
    def forward(ctx: Any, frame: Frame, anchor: Tensor, backward: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.frame, ctx.anchor, ctx.run = frame, anchor, backward
        # An output that the loss does not use gets None, not zeros: those would be summed into gradients (and -0 + 0 is
        # another number than -0).
        ctx.set_materialize_grads(False)
        out, unreached = frame.run(anchor, [x.detach() for x in inputs])
        ctx.mark_non_differentiable(*unreached)
        return tuple(out)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gradients = ctx.run(ctx.frame, ctx.anchor, grads)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(grad if need else None for grad, need in zip(gradients, needed, strict=True))
