"""Uses of a model at the seams between its blocks that could not be trained exactly, found in its first pass.

Outside a block plain PyTorch may use the block's weights and whatever is computed inside it. With offloading only the
block's output is part of the outer graph: when the backward comes, the inside is gone, or another iteration's. So each
block runs with a graph of its own here, on detached inputs; what the loss's backward then reaches in there tells of
such a use.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lt_offload import limits
from lt_offload.compat.torch import (
    BatchNorm,
    address_of,
    has_storage,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lt_offload.errors import OffloadError
from lt_offload.machine.dispatch import OperationLog, OperationMode, called_with_care, needs_care, writes
from lt_offload.model.blocks import Block, CalledOtherwise, Structure
from lt_offload.model.calls import (
    Call,
    edges,
    has_values,
    is_block_node,
    is_entry_node,
    kept_by_functions,
    saved_by,
    tensors_of,
)
from lt_offload.model.head import HeadLoss
from lt_offload.model.objects import held_by
from lt_offload.model.parts import Cut, check_rows
from lt_offload.model.snapshot import version
from lt_offload.model.state.contexts import alone
from lt_offload.model.state.effects import Effects, Rest, Snapshot
from lt_offload.model.state.generators import drawing
from lt_offload.model.state.hooks import InnerHooks
from lt_offload.profiling.host_reads import Readers
from lt_offload.profiling.step.model_call import note_result, result_like

_log = logging.getLogger(__name__)


_Versions = list[tuple[weakref.ref[Tensor], int]]
"""Tensors with their versions, which count writes."""


class BoundaryCheck:
    """One run of a model, seen from between its blocks.

    ``readers`` pause in every run of a block beyond the one that the model asked for.
    """

    def __init__(self, structure: Structure, readers: Readers) -> None:
        self._blocks = structure.blocks
        self._readers = readers
        self.once: dict[int, str] = {}
        """Blocks that must not run a second time for their backward, nor without a graph, and why."""
        self._given: list[tuple[int, _Versions, Rest]] = []
        """Per run of a block: its index, its argument tensors with their versions, and other state that it has seen."""
        self._kinds: dict[int, Call] = {}
        """By block: the call that it had."""
        names: dict[nn.Parameter, int] = Counter(p for b in structure.blocks for p in {*b.module.parameters()})
        self._shared = {p: name for name, p in structure.tensors if names[p] > 1}
        """Weights of several blocks."""
        self._cast: dict[nn.Parameter, int] = {}
        """The first block that has cast each of these."""
        self._rest = Rest([])
        """The state that the last block has seen."""
        self._inputs: list[tuple[Any, int, int]] = []
        """Per activation that a block was given: its node, the number of that node's output, and its number of uses."""

    def let_go(self) -> None:
        """Let go of the model's graph and of the calls, when all has been checked."""
        self._kinds.clear()
        self._inputs.clear()
        self._given.clear()

    def run(
        self,
        index: int,
        call: Call,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entered: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        first: bool,
    ) -> Any:
        """Run a block, or a part of its batch, in a private graph; return its output, which is that graph's.

        ``args`` and ``kwargs`` are the call's, ``entered`` those of the part in its graph; ``first``: it is the first
        part, or all.
        """
        leaves = tree_leaves((args, kwargs))
        # Weak: what the model lets go of must die here as it does in training, where bytes are counted.
        versions = [(weakref.ref(leaf), version(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        origins = [(leaves[slot].grad_fn, int(leaves[slot].output_nr)) for slot in call.slots] if first else []
        leaves, spec = tree_flatten(entered)
        inputs = [leaves[slot] for slot in call.slots]
        del args, kwargs, entered

        def run() -> Any:
            # As training does it: without a graph no input requires grad, and some operations ask that before they
            # choose a kernel.
            entering = list(leaves)
            if not torch.is_grad_enabled():
                for slot, tensor in zip(call.slots, inputs, strict=True):
                    entering[slot] = tensor.detach()
            args, kwargs = tree_unflatten(entering, spec)
            return forward(*args, **kwargs)

        self._kinds[index] = call
        module, since = self._blocks[index].module, len(self._readers.noted)
        other = result_like(call, leaves, module, self._readers)
        if call.has_backward and not torch.is_grad_enabled():
            call.unrecorded = True
            other = run
        if other is not None:
            out = other()
            self._given.append((index, versions, Rest([])))
            assert call.uses is not None
            self._note_inputs(origins, call.uses)  # as another of its kind, which has had a graph
            return out
        constant = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.requires_grad]
        out = self._run_twice(index, call, run, versions)
        # An argument that nothing was to reach the gradient of stays the caller's own: what was added would have none.
        if any(leaf.grad_fn is not None for leaf in constant):  # a leaf may have been made to require gradients
            what = "an argument in place, where gradients have to reach it"
            raise limits.IN_PLACE_INPUT.error(f"block {self._blocks[index].name} has written to {what}")
        del constant
        self._given.append((index, versions, self._rest))
        if self._shared:
            self._check_kept(index, call, out)
        self._check_hidden(index, leaves, out)
        uses, cut = _uses(inputs, out), call.cut()
        if cut is not None:  # what every part is given is used by each; rows are put together before they are given on
            pairs = zip(call.slots, uses, strict=True)
            uses = [min(used, 1) if slot in cut.rows else used * len(cut.sizes) for slot, used in pairs]
        call.uses = uses
        self._note_inputs(origins, uses)
        note_result(call, leaves, module, out, self._readers.noted[since:])
        return out

    def _note_inputs(self, origins: Sequence[tuple[Any, int]], uses: Sequence[int]) -> None:
        pairs = list(zip(origins, uses, strict=False))  # of further parts nothing is said
        self._inputs += [(node, number, used) for (node, number), used in pairs]
        mark_reached(origin for origin, used in pairs if used)

    def repeats(self, index: int, call: Call) -> bool:
        """Return whether a block may run again for its backward, as far as those of its kind have shown that."""
        self.find_rewritten()
        known = call.uses is not None and not call.other_kernels and not call.compiled
        known = known and not any(self._kinds.get(other) is call for other in self.once)
        block = self._blocks[index]
        known = known and not isinstance(call.module, HeadLoss)
        return known and index not in self.once and InnerHooks(block.name, block.module).find() is None

    def _run_twice(self, index: int, call: Call, forward: Callable[[], Any], arguments: _Versions) -> Any:
        """Run a block with a graph, and once more without one from the state that it had; return the first output.

        Of blocks of one kind the first that runs twice shows what holds for all, unless it draws or leaves a trace.
        Another one of its kind runs twice if it calls other operations, as a number among its attributes may tell it.

        One that has hooks of users inside, or that fails without a graph, has to run once. One whose numbers are others
        without a graph (torch chooses kernels by that) always has to run with one. Bits alone would not tell: two
        kernels may agree on one batch, or on one device, and differ by the last bits on the next. So both runs also
        have to call the same operations. Raises ``UnsupportedError`` if outputs differ by a bit even with a graph, or
        the block writes to its input.
        """
        block, self._rest, known = self._blocks[index], Rest([]), call.operations
        if call.compiled or (known is not None and not has_values(call)) or isinstance(call.module, HeadLoss):
            return self._run_kept(index, call, forward)  # always with a graph, or all that can be known is known
        hook = InnerHooks(block.name, block.module).find()
        if hook is not None or call.contexts.modes:
            out = self._run_kept(index, call, forward)
            self._runs_once(index, call, "for its hooks", hook or f"it runs within {call.contexts.modes[-1]}")
            return out
        before_draws = call.draws()
        watched = 3 if has_values(call) else 0
        with Effects(block.module, watched=watched).first_run() as before, OperationLog() as operations:
            out = self._run_kept(index, call, forward)
        self._rest = before.rest
        if call.seen is None:
            call.seen, call.held_bytes, call.copied_bytes = before.rest, before.held_bytes, before.copied_bytes
        if known is not None and before.changed:
            self.once.setdefault(index, "as its forward changes it, unlike others of its kind")
        elif _any_written(arguments):
            self._note_rewritten(index, "an argument")
        elif known is None or operations.called != known:
            self._compare(index, call, forward, out, operations.called, before, before_draws)
            # What draws may have been left out this time, and what has changed itself is another block the next time.
            alike = not has_values(call) or (not before.changed and all(map(torch.equal, before_draws, call.draws())))
            if alike and known is None and index not in self.once:
                call.operations = operations.called
                if not has_values(call) and not before.changed:
                    call.alike = {}
        return out

    def _compare(
        self,
        index: int,
        call: Call,
        forward: Callable[[], Any],
        out: Any,
        operations: list[str],
        before: Snapshot,
        before_draws: list[Tensor],
    ) -> None:
        """Compare a run with a graph, which has returned ``out`` and called ``operations``, with further ones."""

        def again(*, graph: bool) -> tuple[Any, list[str]]:
            return self._repeat(call, forward, before, before_draws, graph=graph)

        try:
            other, called = again(graph=False)
        except Exception as error:  # whatever users' code raises where there is no graph
            why = f"without gradients it raises {error!r}"
            self._runs_once(index, call, f"as {why}", why)
            return
        if operations != called:
            name = self._blocks[index].name
            _log.info("block %s always runs with a graph: without one torch calls other operations", name)
            call.other_kernels = True
        if has_values(call) and not _equal(other, out):
            # Kernels that add in no fixed order do not repeat their own bits: then nothing can be said, and with a
            # graph both runs are at least of the same kernels. That is always right, and takes some memory.
            call.other_kernels = True
            if _repeats(call) and not _equal(again(graph=True)[0], out):
                name = self._blocks[index].name
                raise limits.OTHER_SECOND_RUN.error(f"block {name} gave other numbers when it ran again")
        kept = kept_by_functions(out) if has_values(call) and _repeats(call) else []
        if kept and kept_by_functions(again(graph=True)[0]) != kept:
            why = "what its autograd.Function keeps for the backward changes from run to run"
            _log.info("block %s runs once per iteration: %s", self._blocks[index].name, why)
            self.once.setdefault(index, f"as {why}")

    def _repeat(
        self, call: Call, forward: Callable[[], Any], before: Snapshot, before_draws: list[Tensor], *, graph: bool
    ) -> tuple[Any, list[str]]:
        """Run a block once more, from the state that it had and with the same draws; return what it calls, too."""
        with ExitStack() as stack:
            stack.enter_context(drawing(call.devices, before_draws))
            stack.enter_context(alone(call.contexts))
            stack.enter_context(before.restored(graph=graph))
            stack.enter_context(self._readers.paused())
            stack.enter_context(torch.set_grad_enabled(graph))
            operations = stack.enter_context(OperationLog())
            return forward(), operations.called

    def _runs_once(self, index: int, call: Call, reason: str, why: str) -> None:
        """Note that a block runs once per iteration, for a ``reason`` in the words of errors; ``why``: of the log."""
        if not call.has_backward:
            call.other_kernels = True  # nothing will ask it to run again, and plain PyTorch has gradients on
            return
        _log.info("block %s runs once per iteration, with a graph: %s", self._blocks[index].name, why)
        self.once.setdefault(index, reason)

    def find_rewritten(self) -> None:
        """Find blocks whose arguments or buffers somebody has written to by now: these run once, too."""
        for index, versions, rest in self._given:
            buffer = rest.rewritten()
            what = "an argument" if _any_written(versions) else buffer
            if what is not None:
                self._note_rewritten(index, what)

    def _note_rewritten(self, index: int, what: str) -> None:
        _log.info("block %s runs once per iteration: %s is written to in or after it", self._blocks[index].name, what)
        # A block that runs once for another reason keeps that one.
        self.once.setdefault(index, f"as {what} is written to")

    def _run_kept(self, index: int, call: Call, forward: Callable[[], Any]) -> Any:
        """Run a block with a graph, which is none where nothing requires gradients, and refuse writes to its input."""
        refused = limits.IN_PLACE_INPUT.error(f"block {self._blocks[index].name} has written to its input")
        versions = [version(leaf) for leaf in call.inputs]
        try:
            with torch.enable_grad():
                out = forward()
        except RuntimeError as error:
            # Autograd says so itself where gradients have to reach the input; otherwise its version tells.
            if "in-place operation" in str(error) or "modified inplace" in str(error):
                raise refused from error
            raise
        if [version(leaf) for leaf in call.inputs] != versions:
            raise refused
        return out

    def _check_kept(self, index: int, call: Call, out: Any) -> None:
        """Refuse a weight of this block and another one of which something is kept: it would be made once for both."""
        weights = _parametrized(call)
        if call.contexts.autocasts and call.contexts.caches_casts:
            # A cast is a node of this name; behind it is the leaf of the weight that was cast.
            casts = (node for node, _ in edges(t.grad_fn for t in tensors_of(out)) if node.name() == "ToCopyBackward0")
            weights += [getattr(cast.next_functions[0][0], "variable", None) for cast in casts]
        for weight in weights:
            if weight in self._shared and self._cast.setdefault(weight, index) != index:
                first, second = self._blocks[self._cast[weight]].name, self._blocks[index].name
                raise limits.SHARED_CAST.error(f"weight {self._shared[weight]} of blocks {first} and {second}")

    def _check_hidden(self, index: int, leaves: Sequence[Any], out: Any) -> None:
        """Refuse tensors of other blocks that this block uses without having been given them as arguments."""
        block = self._blocks[index]
        objects = sorted({type(leaf).__name__ for leaf in leaves if not _is_plain(leaf)})
        own = {id(parameter) for parameter in block.module.parameters()}
        others = {id(parameter) for _, parameter in self._parameters()} - own
        for node, _ in edges(t.grad_fn for t in tensors_of(out)) if objects else ():
            if is_block_node(node) or id(getattr(node, "variable", None)) in others:
                raise limits.HIDDEN_TENSORS.error(f"block {block.name} uses tensors that a {objects[0]} holds")
        for leaf in tree_leaves(out):
            if not _is_plain(leaf) and any(isinstance(held, Tensor) and held.requires_grad for held in held_by(leaf)):
                name = type(leaf).__name__
                raise limits.HIDDEN_TENSORS.error(f"block {block.name} returns tensors that a {name} holds")

    def check_samples(self, block: Block, call: Call, forward: Callable[..., Any]) -> None:
        """Refuse a block that cannot take a batch in parts: in which samples depend on each other, for example.

        Two samples show it: no gradient of what the first one gives reaches the second.
        """
        samples = call.cut()
        if samples is None:
            return
        for name, module in block.module.named_modules():
            if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
                what = f"{type(module).__name__} {name or 'itself'}"
                raise limits.MICRO_BATCHES.error(f"block {block.name} takes statistics over a batch ({what})")
        casts = call.contexts.autocasts and call.contexts.caches_casts
        if call.has_backward and (casts or _parametrized(call)):
            raise limits.SHARED_CAST.error(
                f"weights of block {block.name}, for several parts of a batch (micro_batches)"
            )
        if InnerHooks(block.name, block.module).find() is not None:
            return  # they would be called once more
        unseen = drawing(call.devices, call.draws())
        with unseen, Effects(block.module).untouched(), self._readers.paused():
            try:
                self._check_two(block, call, forward, samples)
            except OffloadError:
                raise
            except (RuntimeError, ValueError, IndexError) as error:  # whatever users' code makes of another shape
                raise limits.MICRO_BATCHES.error(f"block {block.name} fails on a part of a batch: {error}") from error

    def _check_two(self, block: Block, call: Call, forward: Callable[..., Any], cut: Cut) -> None:
        rows = cut.rows
        leaves = [
            leaf[: 2 * cut.several.get(at, 1)].detach() if at in rows else leaf for at, leaf in enumerate(call.leaves)
        ]
        inputs = []
        for at in rows:
            if leaves[at].is_floating_point() and at in call.slots:
                leaves[at] = leaves[at].requires_grad_()
                inputs.append(leaves[at])
        args, kwargs = tree_unflatten(leaves, call.spec)
        with torch.enable_grad():
            outputs = tensors_of(forward(*args, **kwargs))
        assert call.cutter is not None
        for out in outputs:
            check_rows(call.cutter, out, 2)
        outputs = [out for out in outputs if out.requires_grad]
        # Parts add the gradients of all uses of a weight part by part, plain PyTorch use by use: several uses would be
        # another order of sums.
        uses = Counter(id(getattr(node, "variable", None)) for node, _ in edges(out.grad_fn for out in outputs))
        for name, parameter in block.module.named_parameters():
            if uses[id(parameter)] > 1:
                raise limits.MICRO_BATCHES.error(f"block {block.name} uses its weight {name} several times")
        if not has_values(call) or not outputs or not inputs:
            return
        first = [torch.zeros_like(out) for out in outputs]
        # Gradients for the first sample alone: what then reaches the second one has crossed over.
        for seed in first:
            seed[:1] = 1
        for gradient in torch.autograd.grad(outputs, inputs, first, allow_unused=True):
            # A NaN is no sign: kernels make one of zero times infinity, too.
            if gradient is not None and gradient[1:].nan_to_num().count_nonzero():
                raise limits.MICRO_BATCHES.error(f"samples of a batch depend on each other in block {block.name}")

    def check_consumers(self, loss: Tensor) -> None:
        """Refuse a block's output that others use beside blocks that use it more than once.

        Plain PyTorch adds gradients one by one as they come; blocks give the sum of their own, which is another order
        of summation unless there is only one.
        """
        # A block has no edge from its output to its inputs, which were detached: behind each block the search begins
        # anew.
        roots = [loss.grad_fn, *(node for node, _, _ in self._inputs)]
        consumers = Counter((id(node), number) for node, number in edges(roots, outer=True))
        consumers.update((id(node), number) for node, number, _ in self._inputs)
        uses: Counter[tuple[int, int]] = Counter()
        blocks = Counter((id(node), number) for node, number, _ in self._inputs)
        for node, number, used in self._inputs:
            uses[id(node), number] += used
        for node, number, _ in self._inputs:
            at = id(node), number
            # More edges lead to it than blocks have: somebody else uses it as well.
            if uses[at] > 1 and consumers[at] > blocks[at]:
                index = getattr(node, "index", None)
                name = "an operation" if index is None else f"block {self._blocks[index].name}"
                raise limits.SEVERAL_CONSUMERS.error(f"the output of {name} is used in several places")

    def saved_outside(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the tensors that operations outside the blocks save for the backward of ``loss``."""
        roots = [loss.grad_fn, *(node for node, _, _ in self._inputs)]
        nodes = {id(node): node for node in (*roots, *(node for node, _ in edges(roots, outer=True)))}
        for node in nodes.values():
            if not is_block_node(node):
                yield from saved_by(node)

    def check_inside(self, loss: Tensor) -> None:
        """Refuse a loss that leads into the private graph of a block, before any backward."""
        for node, _ in edges([loss.grad_fn, *(node for node, _, _ in self._inputs)], outer=True):
            if is_entry_node(node):
                name = self._blocks[node.block].name
                raise limits.INNER_TENSOR.error(f"the loss uses a tensor from inside block {name}")

    def check_gradients(self, loss: Tensor, known: Collection[nn.Parameter]) -> None:
        """Refuse weights of blocks that the loss, or the inputs of other blocks, use outside of these.

        Weights in ``known`` had a gradient before the step. Raises ``CalledOtherwise`` if none of these blocks is a
        layer: without them, which stay on the device, and ``UnsupportedError`` naming the block or the weight.
        """
        # The backward of a block's output goes no further, so that what made its inputs has no gradients.
        roots = [loss.grad_fn, *(node for node, _, _ in self._inputs)]
        before = {id(getattr(node, "variable", None)) for node, _ in edges(roots, outer=True)}
        used = {p: n for n, p in self._parameters() if (p.grad is not None and p not in known) or id(p) in before}
        users = [block for block in self._blocks if not used.keys().isdisjoint(block.module.parameters())]
        if used:
            refused = limits.OUTSIDE_USE.error(f"the loss uses weight {next(iter(used.values()))} outside its block")
            if any(block.kind == "layer" for block in users):
                raise refused
            raise CalledOtherwise(str(refused), [block for block in self._blocks if block not in users])

    def check_results(self, result: Any) -> None:
        """Refuse results of a model without a loss that come from inside blocks: its caller makes a loss of them."""
        names = {id(parameter): name for name, parameter in self._parameters()}
        roots = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for node, _ in edges(roots):
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise limits.INNER_TENSOR.error(
                    f"the model returns a tensor that depends on weight {name} otherwise than by its block's output"
                )

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for block in self._blocks:
            for name, parameter in block.module.named_parameters():
                yield f"{block.name}.{name}", parameter


def _parametrized(call: Call) -> list[Any]:
    """Return the weights of a block of which ``parametrize.cached()`` keeps what is made of them."""
    lists = (
        [m for m in call.module.modules() if isinstance(m, ParametrizationList)] if call.contexts.parametrized else []
    )
    return [parameter for each in lists for parameter in each.parameters()]


def mark_reached(outputs: Iterable[tuple[Any, int]]) -> None:
    """Note that gradients come to outputs of blocks, behind which lie these ``outputs`` of nodes."""
    outputs = [(node, number) for node, number in outputs if node is not None]
    for node, number in (*outputs, *edges((node for node, _ in outputs), outer=True)):
        if is_block_node(node):
            node.reached(number)  # by a backward that comes in training only


def _uses(entered: Sequence[Tensor], out: Any) -> list[int]:
    roots = [tensor.grad_fn for tensor in tensors_of(out)]
    nodes = [*roots, *(node for node, _ in edges(roots))]
    ends = Counter(id(getattr(node, "variable", node)) for node in nodes)
    return [ends[id(x if x.grad_fn is None else x.grad_fn)] for x in entered]


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, bool, int, float, str, bytes, type(None), torch.dtype, torch.device))


def _any_written(tensors: _Versions) -> bool:
    alive = [(tensor, known) for ref, known in tensors if (tensor := ref()) is not None]
    return any(version(tensor) != known for tensor, known in alive)


def _repeats(call: Call) -> bool:
    """Return whether a block has the same numbers in every run: on a GPU that takes deterministic kernels."""
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    return all(tensor.device.type == "cpu" for tensor in tensors) or torch.are_deterministic_algorithms_enabled()


def _equal(first: Any, second: Any) -> bool:
    """Return whether two outputs are the same number for number, except that any two NaNs are the same."""
    # Logits may be gigabytes: there is room for a truth value per number, not for copies.
    return all(
        a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))
        for a, b in zip(tensors_of(first), tensors_of(second), strict=True)
    )


class WrittenWeights(OperationMode):
    """Refuses a step that writes weights, by ``.data`` as well, which moves no version."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self._weights = dict([*structure.tensors, *structure.rest])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # PEFT's parametrization around each forward of experts with adapters gives a weight the memory that it has.
        same = func is torch.ops.aten.set_.source_Tensor and args[0].is_set_to(args[1])
        if schema_of(func).is_mutable and not same:
            for position, argument in enumerate((*args, *kwargs.values())):
                if writes(func, position, len(args), kwargs):
                    self._check(func, argument if isinstance(argument, (list, tuple)) else [argument])
        return called_with_care(func, *args, **kwargs) if needs_care(func) else func(*args, **kwargs)

    def _check(self, func: Any, written: Sequence[Any]) -> None:
        memory = {address_of(tensor.untyped_storage()) for tensor in written if type(tensor) in (Tensor, nn.Parameter)}
        for name, weight in self._weights.items():
            if has_storage(weight) and address_of(weight.untyped_storage()) in memory:
                raise limits.WRITTEN_WEIGHTS.error(f"weight {name} is written by {func} within the step")


@contextmanager
def runnable(structure: Structure) -> Iterator[None]:
    """Refuse by name TorchScript, and transforms that torch does not let run with hooks, in the steps enclosed."""
    for block in structure.blocks:
        for name, module in block.module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                path = ".".join(filter(None, (block.name, name)))
                raise limits.SCRIPTED.error(f"module {path}, a {type(module).__name__} of torch.jit")

    def refuse(function: Any, *_args: Any, **_kwargs: Any) -> None:
        name = function.qualified_name.removeprefix("__torch__.")
        raise limits.SCRIPTED.error(f"function {name}, of torch.jit")

    scripted: Any = torch.jit.ScriptFunction
    call, scripted.__call__ = scripted.__call__, refuse
    try:
        yield
    except RuntimeError as error:
        # Blocks have no graph here that a step could differentiate through: torch finds no way.
        if "differentiated Tensor" in str(error):
            raise limits.PARTIAL_BACKWARD.error("the step calls torch.autograd.grad") from error
        if "torch.func" in str(error) and "saved tensor hooks" in str(error):
            raise limits.TRANSFORMED_INSIDE.error("a block calls torch.func.grad, vjp, jacrev or hessian") from error
        raise
    finally:
        scripted.__call__ = call
