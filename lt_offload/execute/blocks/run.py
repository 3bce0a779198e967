"""One block's run as an autograd function: one node in the outer graph, with a private graph inside, or several.

A batch runs whole or in slices of samples. Forward and backward of the slices follow each other within one step of the
plan, so that the weights are there once for all of them; in the backward the last slice comes first, as in autograd.
Whatever a slice makes, computes again or works with is free before the next one begins. What travels between forward
and backward travels for all slices together.

Parameters get their gradients inside, where the engine's hooks pick them up; gradients of inputs are what the outer
node returns.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import top_saved_tensors_hooks, tree_flatten, tree_unflatten
from lt_offload.execute.blocks.inner_tensors import InnerTensors
from lt_offload.execute.blocks.shared_inputs import RunningTotal
from lt_offload.execute.blocks.slices import PlannedBlock, Slice, catch, count_uses
from lt_offload.execute.memory.activations import ActivationOffloader, HostPool, SavedTensors, given_back
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model.calls import BlockNode, EntryNode, bit_sums, tensors_of
from lt_offload.model.parts import Joint, Outputs
from lt_offload.model.saving import CacheCostly, ReplayCostly, activations_of, travels
from lt_offload.model.snapshot import version
from lt_offload.model.state.contexts import ambient, within
from lt_offload.schema.plan import Save
from lt_offload.schema.profile import RECORDED, OptionName

TRAVELLING: tuple[OptionName, ...] = ("offload", "mixed", "reload")
"""Options with which something is copied to the host between forward and backward."""


def _ignored(*_: object) -> None:
    pass


class BlockRun:
    """One forward of a block: all that its backward needs, and its recomputation before that.

    It lives as long as the outer graph: a forward whose loss is dropped leaves nothing behind. A *slot* is the position
    of an activation among the leaves of the arguments. ``body`` runs it. ``uses`` says, by block, how often it uses
    each of its inputs; counted in its first backward.
    """

    def __init__(
        self,
        block: PlannedBlock,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        pool: HostPool,
        uses: dict[int, Counter[int]],
        gradients: Gradients | None,
    ) -> None:
        self.block, self.index, self.name = block, block.index, block.name
        self.option, self.body, self.weights = block.option, body, block.weights
        self.offloader: ActivationOffloader | None = None
        if block.option in TRAVELLING:
            self.offloader = ActivationOffloader(block.device, pool, str(block.index))
        leaves, self._spec = tree_flatten((args, kwargs))
        self._cut = None if block.cutter is None else block.cutter.cut(leaves, self._spec)
        self._ambient = ambient()
        self._slots = activations_of(leaves, self._spec.child(0).num_leaves)
        self._shared = [x for at, x in enumerate(leaves) if isinstance(x, Tensor) and at not in self._slots]
        """Masks and tables that all blocks are given: they stay on the device."""
        # Views of a tensor share its version counter, so that this holds for the rows of a slice, too.
        repeats = block.recomputed or self.option not in RECORDED
        self._shared_versions = [version(x) for x in self._shared] if repeats else []
        self._needs_grad: list[bool] = [leaves[slot].requires_grad for slot in self._slots]
        self._first_input = block.index == 0 and block.recomputed
        """Its input is part of the batch, which stays for the whole iteration anyway."""
        self.inputs: list[Tensor] = []
        """The activation inputs of the whole batch, until they have been taken."""
        for slot in self._slots:
            self.inputs.append(leaves[slot])
            leaves[slot] = None  # nobody but the option decides how long an input stays
        self.needs_backward = True in self._needs_grad or True in [w.param.requires_grad for w in self.weights]
        """True if a gradient can reach the block's weights or inputs."""
        # Cut only now: a slice's own view of an activation would keep the whole of it.
        arguments = [leaves] if self._cut is None else self._cut.parts(leaves)
        self.slices = [Slice(block, each, len(self._slots)) for each in arguments]
        self._sizes, self._cutter = ([1], None) if self._cut is None else (self._cut.sizes, block.cutter)
        self._outputs: Outputs
        """What the first run has returned, but for the tensors."""
        self.sources: tuple[int, ...] | None = None
        """Per activation input, which output of the previous block it is; None if one of them is something else."""
        self.totals: list[RunningTotal | None] = []
        """By input, the gradient of what other blocks may use, too."""
        self._ran = False
        """Its first run is over: others may be in other contexts."""
        self.done = False
        """Its backward is over, or will not come."""
        self.forgotten = False
        """Another forward has begun, for which it was closed."""
        self.reached: Callable[[int], None] = _ignored
        """A function that is told, before there is a plan, which outputs gradients will come to."""
        self._uses, self._gradients = uses, gradients

    def take_inputs(self) -> list[Tensor]:
        """Return the activation inputs and forget them: whoever needs them later saves them."""
        inputs, self.inputs = self.inputs, []
        return inputs

    def planned_as(self, index: int, uses: dict[int, Counter[int]], gradients: Gradients | None) -> None:
        """Be the run of block ``index`` of a plan that was made after the forward."""
        self.index = self.block.index = index
        self._uses, self._gradients = uses, gradients

    # -- the first run -----------------------------------------------------------------------------------------------

    def in_graph(self, anchor: Tensor, backward: Any, watch: Callable[[int, Sequence[Tensor]], None] = _ignored) -> Any:
        """Run the forward as a node of the outer graph, whose backward calls ``backward``; return the output.

        ``watch`` is told the inputs before.
        """
        inputs, self.inputs = self.inputs, []
        watch(self.index, inputs)
        tensors = BlockFunction.apply(self, anchor, backward, *inputs)  # type: ignore[no-untyped-call]
        return self._outputs.whole(tensors)

    def forward(self, anchor: Tensor, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward. Return the output tensors, detached, and those among them that no gradient can reach."""
        reached: set[int] = set()
        graph = self.option in RECORDED or self.block.graphed
        outputs = self._outputs = Outputs(self._sizes, self._cutter)
        for at, part in enumerate(self.slices):
            out = outputs.put(at, self._run_first(part, anchor, self._rows(at, inputs)))
            # Without a graph nothing says which outputs depend on what is trained: all numbers might.
            alive = [t.requires_grad if graph else t.is_floating_point() for t in out]
            reached.update([position for position, one in enumerate(alive) if one])
            del out
        whole = outputs.tensors()
        self._ran = True
        return whole, [tensor for position, tensor in enumerate(whole) if position not in reached]

    def run_frozen(self, *, save: bool = False) -> Any:
        """Run the forward of a block that no gradient can reach; return its output. ``save``: keep its inputs."""
        inputs = self.take_inputs()
        if self._cut is None:
            out = self._run_frozen(self.slices[0], inputs, save=save)
        else:
            outputs = Outputs(self._sizes, self._cutter)
            for at, part in enumerate(self.slices):
                outputs.put(at, self._run_frozen(part, self._rows(at, inputs), save=save))
            out = outputs.whole(outputs.tensors())
        self._ran = True
        return out

    def _run_first(self, part: Slice, anchor: Tensor, inputs: Sequence[Tensor]) -> Any:
        """Run the forward of ``part`` and keep what the option says; return its output."""
        block, option = self.block, self.option
        if option in RECORDED:
            out = self._record(part, anchor, inputs, self.offloader, steady=block.steady)
        else:
            with ExitStack() as stack:
                self._note_first(part, stack)
                if option == "mixed":
                    assert self.offloader is not None and not block.graphed
                    part.cache = stack.enter_context(CacheCostly(self.offloader.keep))
                part.versions = [version(x) for x in inputs]
                out = self._run_unrecorded(part, anchor, inputs)
            self._note_outputs(part, out)
            self._save(part, inputs)
            if part.before is not None:
                part.inner = InnerTensors(block.name, part.before, anchor)
        return out

    def _run_frozen(self, part: Slice, inputs: Sequence[Tensor], *, save: bool) -> Any:
        block = self.block
        with ExitStack() as stack:
            if block.recomputed:
                self._note_first(part, stack)
                part.inputs = [*inputs] if self._first_input or save else None
                part.versions = [version(x) for x in inputs]
            stack.enter_context(torch.set_grad_enabled(block.graphed))
            out = self._call(part, inputs)
        if block.recomputed:
            self._note_outputs(part, out)
        return out

    def _note_first(self, part: Slice, stack: ExitStack) -> None:
        """Remember what the first run, within ``stack``, sees and changes, for the runs that repeat it."""
        block, modes = self.block, self._ambient.modes
        if modes:
            raise limits.MODES.error(f"{modes[-1]} around block {block.name}")
        # Before anything is drawn: dropout has to draw the same masks when the block is recomputed.
        part.rng = block.device.rng_state()
        part.before = stack.enter_context(block.effects.first_run())

    def _note_outputs(self, part: Slice, out: Any) -> None:
        if self.block.repeats.watching:
            part.sums = bit_sums(tensors_of(out))

    def _save(self, part: Slice, inputs: Sequence[Tensor]) -> None:
        """Save the input, as it was before the forward, in the way of the option."""
        part.check_untouched(inputs)
        if self.option == "recompute":
            part.inputs = list(inputs)
        elif self.option != "discard":
            assert self.offloader is not None
            take, mixed = self.offloader.take, self.option == "mixed"
            part.inputs = [take(x, watch=True) if mixed or travels(x) else x for x in inputs]

    # -- further runs ------------------------------------------------------------------------------------------------

    def can_recompute(self, outputs: Sequence[Tensor] | None) -> bool:
        """Return whether its input is at hand: saved, or among the previous block's outputs, recomputed just now."""
        here = not self._slots or self.slices[0].inputs is not None
        return here or (outputs is not None and self.sources is not None)

    def take_again(self, outputs: Sequence[Tensor] | None) -> list[list[Tensor]]:
        """Return the inputs of each slice once more: saved, or rows of what the previous block returned just now."""
        assert self.can_recompute(outputs)
        inputs_of_slices: list[list[Tensor]] = []
        for at, part in enumerate(self.slices):
            inputs = part.take_saved()
            if inputs is None:
                inputs = self._rows(at, [outputs[position] for position in self.sources or ()] if outputs else [])
            inputs_of_slices.append(inputs)
        return inputs_of_slices

    def recompute(self, anchor: Tensor, outputs: list[Tensor] | None, save: Save) -> list[Tensor]:
        """Run the forward as it ran first, let go of what was saved and save something else; return the outputs.

        ``outputs``, those of the previous block if it ran again just now, are emptied, so that nobody holds what the
        block does not need.
        """
        inputs = self.take_again(outputs)
        if outputs is not None:
            outputs.clear()
        # Only now: what was saved of the inputs may be on the way back, and closing gives up what nobody has taken.
        for part in self.slices:
            part.release()
        if self.offloader is not None:
            self.offloader.close()
        again = Outputs(self._sizes, self._cutter)
        for at, part in enumerate(self.slices):
            again.put(at, self._recompute(part, anchor, inputs[at], save))
        return again.tensors()

    def _recompute(self, part: Slice, anchor: Tensor, inputs: list[Tensor], save: Save) -> Any:
        part.versions = [version(x) for x in inputs]
        graph = save == "all"
        with self.as_first(part, graph=graph):
            if graph:
                out = self._record(part, anchor, inputs, None, steady=self.block.steady)
            else:
                out = self._run_unrecorded(part, anchor, inputs)
        part.check_outputs(out)
        if graph:
            part.check_inner()
        if save == "input" or self._first_input:
            part.inputs = [*inputs]
        return out

    @contextmanager
    def repeated(self, inputs: Sequence[Tensor], *, graph: bool) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Enclose another run by somebody else, who sees and draws what this one did; yields the arguments."""
        (whole,) = self.slices
        entered = [x.detach().requires_grad_(need) for x, need in zip(inputs, self._needs_grad, strict=True)]
        args, kwargs = self._arguments(whole, entered)
        del entered
        with self.as_first(whole, graph=graph), within(self._ambient):
            yield args, kwargs

    @contextmanager
    def as_first(self, part: Slice, *, graph: bool) -> Iterator[None]:
        """Let the block see and draw what it did in the first run of ``part``, and leave nothing behind."""
        for x, known in zip(self._shared, self._shared_versions, strict=True):
            if version(x) != known:
                raise limits.REWRITTEN.error(f"an argument of block {self.name}, {list(x.shape)} of {x.dtype}")
        part.check_buffers()
        device = self.block.device
        # The generators go back to where they are: the next draw of the model is to be that of plain PyTorch.
        now = device.rng_state()
        device.set_rng_state(part.rng)
        try:
            with part.before.restored(graph=graph) if part.before is not None else nullcontext():
                yield
        finally:
            device.set_rng_state(now)

    # -- the backward ------------------------------------------------------------------------------------------------

    def backward(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward, rebuilding graphs if need be; return the gradients of the activation inputs."""
        if self._cut is None:
            gradients = self._backward(self.slices[0], anchor, grads, self.totals, count=True)
        else:
            gradients = self._backward_in_slices(anchor, grads)
        self.done = True
        self._shared = []
        if self.offloader is not None:
            self.offloader.close()
        return gradients

    def end(self) -> None:
        """Let go of everything, after another run has had the backward; refuses losses of tensors from inside."""
        for part in self.slices:
            part.check_inner()
        self.close()

    def close(self) -> None:
        """Let go of everything that was saved."""
        self.done = True
        for part in self.slices:
            part.close()
        self.inputs, self._shared = [], []
        if self.offloader is not None:
            self.offloader.close()

    def _backward_in_slices(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        cut = self._cut
        assert cut is not None and self._gradients is not None
        # Other inputs than rows of samples are given to every slice.
        parted = [slot in cut.rows for slot in self._slots]
        if self.index not in self._uses:
            # One gradient per use of an input in plain PyTorch: of all rows, or of each slice.
            shared = [at for at, rows in enumerate(parted) if not rows]
            self._uses[self.index] = Counter(dict.fromkeys(shared, len(self.slices)))
        joint = Joint(cut.sizes)
        # What every slice is given gets its gradients use by use, as several blocks would give them.
        sums = [None if rows else RunningTotal(-1, users=2) for rows in parted]
        outer = [None if total is None or total.users == 1 else total for total in self.totals]
        for inner, total in zip(sums, outer, strict=True):
            if inner is not None and total is not None:
                inner.gradient, total.gradient = total.gradient, None
        for at in reversed(range(len(self.slices))):
            mine = [None if grad is None else cut.of(at, grad) for grad in grads]
            joint.put(at, self._backward(self.slices[at], anchor, mine, sums))
            if at:
                # Each slice is a use of every weight: one that gave no gradient is counted as such, and one that did
                # may give another.
                self._gradients.end_block(self.weights)
                self._gradients.begin_block(self.weights)
        pairs = zip(joint.results(), sums, strict=True)
        gradients = [whole if inner is None else inner.gradient for whole, inner in pairs]
        for at, total in enumerate(outer):
            if total is not None:
                gradients[at] = _sum(total.gradient, gradients[at])
                total.gradient = None
                if total.first != self.index:
                    total.gradient, gradients[at] = gradients[at], None
        return gradients

    def _backward(
        self,
        part: Slice,
        anchor: Tensor,
        grads: Sequence[Tensor | None],
        totals: Sequence[RunningTotal | None],
        *,
        count: bool = False,
    ) -> list[Tensor | None]:
        """Run the backward of ``part``, rebuilding the graph if need be; return the gradients of its inputs.

        ``totals``: by input, the gradient of what other blocks or slices may use, too. ``count``: count the uses of the
        inputs, if that has not been done.
        """
        if part.roots is None:
            self._rebuild(part, anchor)
        roots, part.roots, part.inputs = part.roots or [], None, None
        if count and self.index not in self._uses:
            self._uses[self.index] = count_uses([root.node for root in roots if root is not None])
        pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root is not None and grad is not None]
        del roots  # an output that the loss does not use must not keep its part of the graph alive
        # The sum so far enters at the input's own node: there autograd adds this block's uses to it one by one, in the
        # order of plain PyTorch. Added from outside, it would be added to their sum, with other last bits.
        shared = [(slot, total) for slot, total in enumerate(totals) if total is not None and total.users > 1]
        for slot, total in shared:
            entry = part.entries[slot]
            if total.gradient is not None and entry is not None:
                pairs.append((entry, total.gradient))
                total.gradient = None
        if pairs:
            # Nested in the outer backward, on its thread. Not autograd.grad: parameters' hooks have to fire one by one,
            # so that each gradient leaves as soon as it is complete.
            part.in_backward = True
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
            part.in_backward = False
        gradients, part.input_grads = part.input_grads, []
        for slot, total in shared:
            if total.first != self.index:
                total.gradient, gradients[slot] = gradients[slot], None
        part.close()
        return gradients

    def _rebuild(self, part: Slice, anchor: Tensor) -> None:
        inputs = part.take_saved()
        assert inputs is not None or not self._slots, f"block {self.name} has nothing to run its backward from"
        with self.as_first(part, graph=True):
            part.check_outputs(self._record(part, anchor, inputs or [], None, steady=True))
        part.check_inner()

    # -- any run -----------------------------------------------------------------------------------------------------

    def _record(
        self,
        part: Slice,
        anchor: Tensor,
        inputs: Sequence[Tensor],
        offloader: ActivationOffloader | None,
        *,
        steady: bool,
    ) -> Any:
        """Run the forward and keep its graph; what it saves travels with ``offloader`` if there is one.

        Without an offloader the graph may hold the weights themselves if they are ``steady``: at the same address
        until the graph has been used.
        """
        hooks: AbstractContextManager[Any] = nullcontext()
        # Ours are the innermost hooks, and autograd asks no others. Those around the block (of torch.utils.checkpoint)
        # would throw away what the graph saves, and run the block again by themselves.
        if offloader is not None or not steady or top_saved_tensors_hooks(True):
            stay = [*self._shared, *self.block.buffers] if offloader is not None else []
            hooks = SavedTensors(self.weights, offloader, stay)
        with torch.enable_grad(), hooks:
            entered = self._enter(part, anchor, inputs)
            del inputs  # only the graph holds them from here on, so that what travels is free once it has left
            part.entries = [get_gradient_edge(x) if x.requires_grad else None for x in entered]
            if part.cache is None:
                out = self._call(part, entered)
            else:
                with ReplayCostly(part.cache, given_back, limits.OTHER_SECOND_RUN.error):
                    out = self._call(part, entered)
        part.roots = [get_gradient_edge(t) if t.requires_grad else None for t in tensors_of(out)]
        return out

    def _run_unrecorded(self, part: Slice, anchor: Tensor, inputs: Sequence[Tensor]) -> Any:
        """Run the forward; whatever graph it builds ends with its outputs."""
        graphed = self.block.graphed
        with torch.set_grad_enabled(graphed):
            return self._call(part, self._enter(part, anchor, inputs) if graphed else inputs)

    def _enter(self, part: Slice, anchor: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        ref, index = weakref.ref(part), self.block.index
        return [
            EntryNode.apply(anchor, x, index, slot, partial(catch, ref, slot)) if need else x  # type: ignore[no-untyped-call]
            for slot, (x, need) in enumerate(zip(inputs, self._needs_grad, strict=True))
        ]

    def _call(self, part: Slice, inputs: Sequence[Tensor]) -> Any:
        args, kwargs = self._arguments(part, inputs)
        # A backward runs outside the contexts of the first call, and on CUDA on another thread. Autocast is entered
        # anew even where it is the same: when it is left, so are its casts of weights, none of which outlives a block.
        if not self._ambient.keeps and (not self._ran or self._ambient == ambient()):
            return self.body(*args, **kwargs)
        with within(self._ambient):
            return self.body(*args, **kwargs)

    def _arguments(self, part: Slice, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(part.leaves)
        for slot, tensor in zip(self._slots, inputs, strict=True):
            leaves[slot] = tensor
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, self._spec)
        return arguments

    def _rows(self, part: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        cut = self._cut
        if cut is None:
            return list(inputs)
        return [cut.of(part, x) if slot in cut.rows else x for slot, x in zip(self._slots, inputs, strict=True)]


def _sum(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if before is None else before if gradient is None else before + gradient


class BlockFunction(BlockNode):
    """One block in the outer graph.

    ``anchor`` requires grad, so that a block has a backward even if none of its inputs does (LoRA's first block).
    """

    @staticmethod
    @override
    def forward(ctx: Any, run: BlockRun, anchor: Tensor, backward: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.block_run, ctx.anchor, ctx.run_backward = run, anchor, backward
        ctx.index, ctx.reached = run.index, run.reached
        # An output that the loss does not use gets None, not zeros: those would be summed into gradients (and -0 + 0 is
        # another number than -0).
        ctx.set_materialize_grads(False)
        # Detached: the private graph must not go on into the outer one, whose backward is another call.
        out, unreached = run.forward(anchor, [x.detach() for x in inputs])
        ctx.mark_non_differentiable(*unreached)
        return tuple(out)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gradients = ctx.run_backward(ctx.block_run, ctx.anchor, grads)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *[grad if need else None for grad, need in zip(gradients, needed, strict=True)]
