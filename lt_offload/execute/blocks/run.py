"""One block's run as an autograd function: one node in the outer graph, with a private graph inside, or several.

A batch runs whole or in parts of samples. Forward and backward of the parts follow each other within one step of the
plan, so that the weights are there once for all of them; in the backward the last part comes first, as in autograd.
Whatever a part makes, computes again or works with is free before the next one begins. What travels between forward and
backward travels for all parts together.

Parameters get their gradients inside, where the engine's hooks pick them up; gradients of inputs are what the outer
node returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lt_offload.compat.torch import tree_flatten, tree_unflatten
from lt_offload.execute.blocks.part_run import BlockCall, PartRun, PlannedBlock
from lt_offload.execute.blocks.shared_inputs import RunningTotal
from lt_offload.execute.memory.activations import ActivationOffloader, HostPool
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model.calls import BlockNode
from lt_offload.model.parts import Cutter, Joint, Outputs, check_same, other_outputs
from lt_offload.schema.plan import Save
from lt_offload.schema.profile import OptionName

TRAVELLING: tuple[OptionName, ...] = ("offload", "mixed", "reload")
"""Options with which something is copied to the host between forward and backward."""


class BlockRun:
    """One forward of a block: all that its backward needs, and its recomputation before that.

    It lives as long as the outer graph: a forward whose loss is dropped leaves nothing behind.

    Args:
        block: as it is planned.
        forward: runs it.
        weights: of the block.
        args: of the call.
        kwargs: of the call.
        pool: host memory of activations.
        uses: by block, how often it uses each of its inputs; counted in its first backward.
        gradients: collects those of the weights.
    """

    def __init__(
        self,
        block: PlannedBlock,
        forward: Callable[..., Any],
        weights: Sequence[Weight],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        pool: HostPool,
        uses: dict[int, Counter[int]],
        gradients: Gradients | None,
    ) -> None:
        self.block, self.index, self.name = block, block.index, block.name
        self.option = block.option
        self.offloader: ActivationOffloader | None = None
        if block.option in TRAVELLING:
            self.offloader = ActivationOffloader(block.device, pool, str(block.index))
        leaves, spec = tree_flatten((args, kwargs))
        self._cut = None if block.cutter is None else block.cutter.cut(leaves, spec)
        self.call = call = BlockCall(block, forward, weights, leaves, spec, self.offloader)
        self.inputs: list[Tensor] = []
        """The activation inputs of the whole batch, until they have been taken."""
        for slot in call.slots:
            self.inputs.append(leaves[slot])
            leaves[slot] = None  # nobody but the option decides how long an input stays
        self.needs_backward = True in call.needs_grad or any(weight.param.requires_grad for weight in weights)
        """True if a gradient can reach the block's weights or inputs."""
        # Cut only now: a part's own view of an activation would keep the whole of it.
        self.parts = [PartRun(call, part) for part in ([leaves] if self._cut is None else self._cut.parts(leaves))]
        self.sources: tuple[int, ...] | None = None
        """Per activation input, which output of the previous block it is; None if one of them is something else."""
        self.totals: list[RunningTotal | None] = []
        """By input, the gradient of what other blocks may use, too."""
        self.done = False
        """Its backward is over, or will not come."""
        self.forgotten = False
        """Another forward has begun, for which it was closed."""
        self.reached: Callable[[int], None] = _ignored
        """A function that is told, before there is a plan, which outputs gradients will come to."""
        self._uses, self._gradients = uses, gradients

    def __del__(self) -> None:
        # Of a forward whose loss was dropped: what is saved refers to the offloader, and waits for the collector else.
        if self.offloader is not None:
            self.offloader.close()

    def take_inputs(self) -> list[Tensor]:
        """Return the activation inputs and forget them: whoever needs them later saves them."""
        inputs, self.inputs = self.inputs, []
        return inputs

    def forward(self, anchor: Tensor, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward. Return the output tensors, detached, and those among them that no gradient can reach."""
        if self._cut is None:
            return self.parts[0].forward(anchor, inputs, self.option)
        joint = Joint(self._cut.sizes, self._cutter)
        reached: set[int] = set()
        for at, part in enumerate(self.parts):
            out, unreached = part.forward(anchor, self._rows(at, inputs), self.option)
            joint.put(at, out)
            dead = {id(tensor) for tensor in unreached}
            reached |= {position for position, tensor in enumerate(out) if id(tensor) not in dead}
            del out, unreached
        self._check_alike()
        whole: list[Tensor] = joint.results()
        return whole, [tensor for position, tensor in enumerate(whole) if position not in reached]

    def planned_as(self, index: int, uses: dict[int, Counter[int]], gradients: Gradients | None) -> None:
        """Be the run of block ``index`` of a plan that was made after the forward.

        Args:
            index: of the block.
            uses: by block, how often it uses each of its inputs.
            gradients: collects those of the weights.
        """
        self.index = self.block.index = index
        self._uses, self._gradients = uses, gradients

    def run_frozen(self, *, save: bool = False) -> Any:
        """Run the forward of a block that no gradient can reach; return its output. ``save``: keep its inputs."""
        inputs = self.take_inputs()
        if self._cut is None:
            return self.parts[0].run_frozen(inputs, save=save)
        outputs = Outputs(self._cutter, self._cut.sizes)
        for at, part in enumerate(self.parts):
            outputs.put(at, part.run_frozen(self._rows(at, inputs), save=save))
        return outputs.result()

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the block's output structure with ``tensors`` in place."""
        first = self.parts[0]
        assert first.out_spec is not None
        leaves, first.out = first.out, []
        for slot, tensor in zip(first.out_slots, tensors, strict=True):
            leaves[slot] = tensor
        return tree_unflatten(leaves, first.out_spec)

    def can_recompute(self, outputs: Sequence[Tensor] | None) -> bool:
        """Return whether its input is at hand: saved, or among the previous block's outputs, recomputed just now."""
        return self.parts[0].can_recompute or (outputs is not None and self.sources is not None)

    def take_again(self, outputs: Sequence[Tensor] | None) -> list[list[Tensor]]:
        """Return the inputs of each part once more: saved, or rows of the previous block's outputs.

        Args:
            outputs: what the previous block has returned, having run again just now.
        """
        assert self.can_recompute(outputs)
        inputs_of_parts: list[list[Tensor]] = []
        for at, part in enumerate(self.parts):
            inputs = part.take_saved()
            if inputs is None:
                inputs = self._rows(at, [outputs[position] for position in self.sources or ()] if outputs else [])
            inputs_of_parts.append(inputs)
        return inputs_of_parts

    def recompute(self, anchor: Tensor, outputs: list[Tensor] | None, save: Save) -> list[Tensor]:
        """Run the forward as it ran first, let go of what was saved and save something else; return the outputs.

        Args:
            anchor: requires grad.
            outputs: what the previous block has returned, if it was recomputed just now; is emptied, so that nobody
                holds what the block does not need.
            save: what to save.
        """
        inputs = self.take_again(outputs)
        if outputs is not None:
            outputs.clear()
        # Only now: what was saved of the inputs may be on the way back, and closing gives up what nobody has taken.
        self._release()
        if self._cut is None:
            return self.parts[0].recompute(anchor, inputs.pop(), save)
        joint = Joint(self._cut.sizes, self._cutter)
        for at, part in enumerate(self.parts):
            joint.put(at, part.recompute(anchor, inputs[at], save))
        return joint.results()

    def backward(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward, rebuilding graphs if need be; return the gradients of the activation inputs."""
        if self._cut is None:
            gradients = self.parts[0].backward(anchor, grads, self.totals, self._uses)
        else:
            gradients = self._backward_in_parts(anchor, grads)
        self.done = True
        self.call.shared = []
        if self.offloader is not None:
            self.offloader.close()
        return gradients

    def end(self) -> None:
        """Let go of everything, after another run of the call by somebody else has had the backward.

        Raises:
            UnsupportedError: if the loss has used a tensor from inside.
        """
        for part in self.parts:
            part.check_inner()
        self.close()

    def close(self) -> None:
        """Let go of everything that was saved."""
        self.done = True
        for part in self.parts:
            part.close()
        self.inputs, self.call.shared = [], []
        if self.offloader is not None:
            self.offloader.close()

    def _release(self) -> None:
        """Let go of what was saved, but not of what a further run needs."""
        for part in self.parts:
            part.release()
        if self.offloader is not None:
            self.offloader.close()

    def _backward_in_parts(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward of each part, the last one first."""
        cut, weights = self._cut, self.call.weights
        assert cut is not None and self._gradients is not None
        # Other inputs than rows of samples are given to every part.
        parted = [slot in cut.rows for slot in self.call.slots]
        if self.index not in self._uses:
            # One gradient per use of an input in plain PyTorch: of all rows, or of each part.
            shared = [at for at, rows in enumerate(parted) if not rows]
            self._uses[self.index] = Counter(dict.fromkeys(shared, len(self.parts)))
        joint = Joint(cut.sizes)
        # What every part is given gets its gradients use by use, as several blocks would give them.
        sums = [None if rows else RunningTotal(-1, users=2) for rows in parted]
        outer = [None if total is None or total.users == 1 else total for total in self.totals]
        for inner, total in zip(sums, outer, strict=True):
            if inner is not None and total is not None:
                inner.gradient, total.gradient = total.gradient, None
        for at in reversed(range(len(self.parts))):
            mine = [None if grad is None else cut.of(at, grad) for grad in grads]
            joint.put(at, self.parts[at].backward(anchor, mine, sums))
            if at:
                # Each part is a use of every weight: one that gave no gradient is counted as such, and one that did may
                # give another.
                self._gradients.end_block(weights)
                self._gradients.begin_block(weights)
        pairs = zip(joint.results(), sums, strict=True)
        gradients = [whole if inner is None else inner.gradient for whole, inner in pairs]
        for at, total in enumerate(outer):
            if total is not None:
                gradients[at] = _sum(total.gradient, gradients[at])
                total.gradient = None
                if total.first != self.index:
                    total.gradient, gradients[at] = gradients[at], None
        return gradients

    @property
    def _cutter(self) -> Cutter:
        assert self.block.cutter is not None
        return self.block.cutter

    def _rows(self, part: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the activation inputs of a part."""
        cut = self._cut
        if cut is None:
            return [*inputs]
        return [cut.of(part, x) if slot in cut.rows else x for slot, x in zip(self.call.slots, inputs, strict=True)]

    def _check_alike(self) -> None:
        """Compare what is no tensor among the outputs, of which the first part's are returned."""
        first = self.parts[0]
        for part in self.parts:
            if part.out_spec != first.out_spec or part.out_slots != first.out_slots:
                raise other_outputs(self._cutter)
        for values in zip(*(part.out for part in self.parts), strict=True):
            check_same(self._cutter, values)


def _sum(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if before is None else before if gradient is None else before + gradient


def _ignored(_output: int) -> None:
    pass


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
        return None, None, None, *(grad if need else None for grad, need in zip(gradients, needed, strict=True))
