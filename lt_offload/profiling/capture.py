"""The first pass of a model: one run, to learn what its blocks are called with and what happens outside them.

Each block runs with a graph of its own, which is dropped when it returns, so that the activations of one block at most
are kept; what lies between blocks and after the last one (the loss) runs as in training. A use that then still reaches
a block's graph by another way than its output cannot be trained exactly: see ``boundary_check.py``.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lt_offload import limits
from lt_offload.compat.torch import tensor_hooks_of, tree_flatten, tree_leaves, tree_map
from lt_offload.errors import ModelError
from lt_offload.machine.accounting import Account, storage_bytes
from lt_offload.model.blocks import Block, CalledOtherwise, Structure
from lt_offload.model.calls import BlockOutput, Call, edges
from lt_offload.model.compiled import Forward, intercept, is_compiled, uncompiled
from lt_offload.model.parts import Cutter, cutters, in_parts
from lt_offload.model.saving import activations_of
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.handed import Containers, Handed
from lt_offload.profiling.boundary_check import BoundaryCheck, Interface, WrittenWeights
from lt_offload.profiling.logits import AfterLoss, LogitsWatch, Tail
from lt_offload.profiling.meters import Meter
from lt_offload.schema.profile import OptionName

Run = Callable[[Any], Any]
Stage = Callable[[nn.Module], AbstractContextManager[None]]
Aside = Callable[[], AbstractContextManager[None]]


@dataclass(kw_only=True, slots=True)
class Seam:
    """What the model's own code does before a block, since the block before has returned."""

    lingering: int = 0
    """Bytes that earlier blocks have returned, which this one is not given and the model's own code still holds."""
    forward: int = 0
    """Bytes that it has had at most beyond what it has left."""
    backward: int = 0
    """Bytes that its backward has at most, with the gradients that it begins with."""
    rest: list[nn.Parameter] = field(default_factory=list)
    """Parameters outside the blocks that get gradients in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """One run of the model."""

    calls: tuple[Call, ...]
    """One per block; blocks that cost the same share one."""
    chained: tuple[bool, ...]
    """Per block: its activations are what the block before returned, untouched."""
    seams: tuple[Seam, ...]
    """Per block: what comes before it."""
    between: int
    """Bytes that live outside the blocks until the backward: masks, tables, what operations between blocks save."""
    once: tuple[bool, ...]
    """Per block: it must not run a second time for its backward, nor without a graph."""
    held: int
    """Bytes of what the model returned, which its caller may hold until it has called the model again, and of what else
    the last block and the loss have made that outlives the step (in an attribute, or a list)."""
    lasting: int
    """Bytes of what outlives the step and was there before the loss: blocks' outputs, and the gradients they retain."""
    tail: Tail
    after: Tail
    """The same of what follows the model's own loss, without that and all before it: other losses, other models."""
    with_loss: Mapping[OptionName, Call]
    """By option under which the last block computes the loss, too: what it is then called with. Empty if it may not."""
    forwards: int
    """Calls of the model with gradients; what is said of blocks is about the largest one."""
    deferred: int
    """How many of them others followed."""
    waiting: int
    """Bytes that those keep until their backward: inputs of blocks, gradients of outputs. With activations that several
    blocks are given, and their gradients."""
    arrived: int
    """Bytes of gradients that the loss itself gives blocks before the last one: they wait for the backward of these."""


def capture(
    structure: Structure,
    run: Run,
    batch: Any,
    *,
    device: torch.device,
    stage: Stage,
    meter: Meter,
    aside: Aside = nullcontext,
    micro_batches: int = 1,
) -> Capture:
    """Run the model on ``batch`` and return what its blocks were called with.

    Args:
        structure: the model's blocks.
        run: calls the model and returns the loss, or something that holds it; what it returns is taken to stay.
        batch: on the device.
        device: where blocks run.
        stage: context in which a block's parameters are on the device.
        meter: tells the time of the tail.
        aside: encloses every run of a block beyond the one that the model asked for.
        micro_batches: parts of the batch that go through each block in turn.

    Raises:
        UnsupportedError: if a block cannot take the batch in parts.
        CalledOtherwise: if blocks are called in another order, or not all of them, or some more than once.
        ModelError: if layers are called more than once.
    """
    with ExitStack() as stack:
        recorder = _CallRecorder(structure, device, stage, meter, aside, cutters(structure, micro_batches))
        for index, block in enumerate(structure.blocks):
            stack.callback(intercept(block.module, recorder.wrap(index, block)))
        stack.callback(recorder.watch.install())
        with recorder.account, torch.enable_grad():
            with WrittenWeights(structure), _whole_backwards():
                result = run(batch)
            return recorder.finish(result)


@contextmanager
def _whole_backwards() -> Iterator[None]:
    """Refuse by name that a step differentiates through blocks: here, where they have no graph, torch finds no way."""
    try:
        yield
    except RuntimeError as error:
        if "differentiated Tensor" in str(error):
            raise limits.PARTIAL_BACKWARD.error("the step calls torch.autograd.grad") from error
        raise


class _CallRecorder:
    """Stands between the model and its blocks."""

    def __init__(
        self,
        structure: Structure,
        device: torch.device,
        stage: Stage,
        meter: Meter,
        aside: Aside,
        cutters: Sequence[Cutter | None],
    ) -> None:
        self.account = Account(device_type=device.type, timeline=True)
        self.blocks = structure.blocks
        self.cutters = cutters
        self.stage, self.meter = stage, meter
        self.boundary = BoundaryCheck(structure, aside)
        self.rest = [parameter for _, parameter in structure.rest]
        self.after = AfterLoss(self.account, meter, self.rest)
        self.watch = LogitsWatch(structure, self.after.begin)
        self._device = device
        self.by_signature: dict[object, Call] = {}
        self.anchor = torch.zeros((), requires_grad=True)
        self._aside = aside
        self._forwards: list[_ModelCall] = []
        """With gradients."""
        self._followed = False
        """The last of them was followed by one without."""
        self._called: list[int] = []
        """Blocks that have been called with gradients, in turn."""
        self._otherwise = False
        """They are not those of the structure: only their order is of interest."""

    def wrap(self, index: int, block: Block) -> Forward:
        """Return what is called instead of the block."""
        original = uncompiled(block.module)  # what a block returns looks the same, and nothing is compiled too early

        def forward(*args: Any, **kwargs: Any) -> Any:
            handed = Handed(args, kwargs)
            if self._device.type != "cpu":
                handed.bring(block, self._device)
            args, kwargs = handed.args, handed.kwargs
            run = handed.around(original)
            if not torch.is_grad_enabled():
                self._followed = bool(self._forwards)
                with self._aside(), self.stage(block.module), within(ambient()):
                    return handed.returned(run(*args, **kwargs))
            self._called.append(index)
            if not self._in_turn(index):
                self._otherwise = True
                return handed.returned(self._pass_by(index, block, run, args, kwargs))
            if not self._forwards or (index == 0 and self._forwards[-1].complete):
                self._begin()
            with nullcontext() if len(self._forwards) == 1 else self._aside():
                return handed.returned(
                    self._forwards[-1].run(index, block, run, args, kwargs, containers=handed.containers)
                )

        return forward

    def _in_turn(self, index: int) -> bool:
        known = len(self._forwards[-1].calls) if self._forwards else 0
        return not self._otherwise and index == known % len(self.blocks)

    def _pass_by(self, index: int, block: Block, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block without a graph, as nothing but the order of calls is of interest any more."""
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        needed = any(tensor.requires_grad for tensor in (*given, *block.module.parameters()))
        with self._aside(), self.stage(block.module), within(ambient()), torch.no_grad():
            out = run(*args, **kwargs)
        position = itertools.count()
        return tree_map(lambda leaf: self.connect(leaf, index, set(), position, []), out) if needed else out

    def connect(self, leaf: Any, index: int, reached: set[int], position: Iterator[int], boxes: list[Any]) -> Any:
        """Make an output of block ``index`` part of the outer graph; gradients come to ``reached`` and ``boxes``."""
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            # In a list, as a tensor that a function returns as it came would become a view of an argument.
            box = [leaf]
            del leaf
            boxes.append(box)
            note = partial(reached.add, next(position))
            # The anchor requires grad, so that the output does: nothing else that the outer graph knows leads here.
            return Interface.apply(self.anchor, box, index, note)  # type: ignore[no-untyped-call]
        return leaf

    def _check_order(self) -> None:
        """Raise unless the blocks were called in turn, naming those that are."""
        if not self._otherwise and self._forwards and self._forwards[-1].complete:
            return
        times = Counter(self._called)
        layers = [times[index] for index, block in enumerate(self.blocks) if block.kind == "layer" and times[index]]
        if not layers:
            uncalled = ", ".join(block.name for block in self.blocks if block.kind == "layer")
            raise CalledOtherwise(f"the model's forward has called none of its layers, {uncalled}", ())
        forwards = min(layers)
        # What is called more often has no place in the sequence, nor has what owns the same tensors.
        apart = {tensor for index in times if times[index] != forwards for tensor in self.blocks[index].tensors}
        called = [index for index in self._called if apart.isdisjoint(self.blocks[index].tensors)]
        turn = called[: len(called) // forwards]
        for index in dict.fromkeys(self._called):
            if self.blocks[index].kind == "layer" and index not in turn:
                raise ModelError(
                    f"the model calls block {self.blocks[index].name} {times[index]} times in {forwards} forwards, or "
                    "shares its weights with one that it calls more often; layers must be called once each"
                )
        names = [self.blocks[index].name for index in turn]
        if called != turn * forwards:
            raise ModelError(f"the model calls its blocks in another order than {', '.join(names)} in a later forward")
        raise CalledOtherwise(
            f"the model calls its blocks in another order each time, at first {', '.join(names)}; they must be called "
            "in the same order",
            [self.blocks[index] for index in turn],
        )

    def _begin(self) -> None:
        if self._forwards:
            self.watch.forgo()
        self._forwards.append(_ModelCall(self))
        self._followed = False

    def finish(self, result: Any) -> Capture:
        """Run the loss's backward; to be called with what the model returned."""
        self._check_order()
        lap = self.meter.lap()
        self.watch.end(result)
        last = self._forwards[-1]
        # Before the backward, which gives most of it back.
        below, live = last.below, self.account.live()
        kept = {self.account.serial(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        saved = last.saved_between(live)
        forward, peak = self.after.end(lap, kept)
        tail = Tail(forward=forward, forward_peak=peak - below, saved=self.account.current - below)
        # Without a loss there is nothing to run: the caller begins with a gradient as large as the output.
        tail.backward_peak = tail.left = tail.saved + last.output_bytes
        loss = find_loss(result)
        if loss is not None and loss.requires_grad:
            self.account.reset_peak()
            self.boundary.check_consumers(loss)
            self.boundary.check_unset()
            self.meter.lap()
            torch.autograd.backward(loss)
            tail.backward = self.meter.lap()
            tail.backward_peak, tail.left = self.account.peak - below, self.account.current - below
            self.after.share(tail)
            self.boundary.check_gradients()
        else:
            self.boundary.check_results(result)
        arrived = storage_bytes(grad for forward in self._forwards for box in forward.boxes for grad in box)
        self.boundary.find_rewritten()
        self.boundary.let_go()
        if loss is not None and loss.requires_grad:
            kept |= self._outliving()
        waiting = self._forwards if self._followed else self._forwards[:-1]
        if waiting and self.boundary.once:
            index, why = min(self.boundary.once.items())
            raise limits.FORWARDS.error(
                f"block {self.blocks[index].name}, which must run once {why}, is in a forward that waits"
            )
        largest = max(self._forwards, key=lambda forward: forward.input_bytes)
        return Capture(
            calls=tuple(largest.calls),
            chained=tuple(largest.chained),
            seams=tuple(largest.seams),
            between=last.between + sum(n for serial, n in live.items() if serial in saved - kept),
            once=tuple(index in self.boundary.once for index in range(len(self.blocks))),
            held=sum(nbytes for serial, nbytes in live.items() if serial in kept - last.before_loss),
            lasting=sum(n for serial, n in live.items() if serial in kept & last.before_loss - last.masks)
            + last.retained_bytes(),
            tail=tail,
            after=self.after.tail,
            with_loss=self.watch.calls(last.calls[-1]),
            forwards=len(self._forwards),
            deferred=len(waiting),
            waiting=sum(forward.saved_bytes + forward.output_bytes for forward in waiting)
            + 2 * sum(forward.several_bytes for forward in self._forwards),
            arrived=arrived,
        )

    def _outliving(self) -> set[int]:
        """Return the storages that are left of the step after its backward, but for those that only calls hold."""
        own = [leaf for call in self.by_signature.values() for leaf in call.leaves if isinstance(leaf, Tensor)]
        own += [draw for call in self.by_signature.values() for first in call.given for draw in first.draws]
        for forward in self._forwards:
            forward.let_go()
        gc.collect()  # an error that was caught holds what was there when it was raised
        return self.account.live().keys() - {self.account.serial(tensor) for tensor in own}


class _ModelCall:
    """One call of the model with gradients."""

    def __init__(self, recorder: _CallRecorder) -> None:
        self._recorder, self._account = recorder, recorder.account
        self.calls: list[Call] = []
        self.chained: list[bool] = []
        self.seams: list[Seam] = []
        self.between = self.below = self.output_bytes = 0
        self.masks: set[int] = set()
        """Storages that ``between`` is about."""
        self.before_loss: set[int] = set()
        """Storages that were there when the last block returned, but for what it returned."""
        self._last_output = BlockOutput(())
        self._shared: list[Tensor] = []
        """Arguments that are no activations: they live until the backward."""
        self._graph: list[Any] = []
        """Nodes of operations between blocks: what those save lives until the backward, too."""
        self._interfaces: set[int | None] = set()
        """Storages of activations between blocks."""
        self._users: Counter[int | None] = Counter()
        """By storage, how many blocks were given it as an activation."""
        self._sizes: dict[int | None, int] = {}
        self._activations: list[weakref.ref[Tensor]] = []
        """What blocks were given and have returned, as the model sees it."""
        self._handed: list[Tensor] = []
        """Those that were there when the last block was called, held until the loss's backward has been run."""
        self._copies: set[int | None] = set()
        """Storages that calls hold, which training would not have."""
        self.boxes: list[list[Tensor]] = []
        """Where gradients of outputs arrive that the loss itself uses, but for the last block's."""
        self._ends: list[GradientEdge] = []
        """Where gradients leave what comes between blocks: outputs of blocks."""
        self._leaves: dict[int, Tensor] = {}
        """Activations that no operation has made and that require gradients, as adapters have it of embeddings."""

    @property
    def complete(self) -> bool:
        """Whether all blocks have been called."""
        return len(self.calls) == len(self._recorder.blocks)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of all blocks."""
        return sum(tensor.nbytes for call in self.calls for tensor in call.inputs)

    @property
    def saved_bytes(self) -> int:
        """Bytes of those inputs of blocks that are not what the block before has returned."""
        pairs = zip(self.calls, self.chained, strict=True)
        return sum(tensor.nbytes for call, chained in pairs if not chained for tensor in call.inputs)

    @property
    def several_bytes(self) -> int:
        """Bytes of activations that several blocks are given: they stay until the first of these has its backward."""
        return sum(self._sizes[storage] for storage, users in self._users.items() if users > 1)

    def let_go(self) -> None:
        """Let go of arguments, and of what operations between blocks save, whose backward is not run."""
        self._graph.clear()
        self._shared.clear()
        self._handed.clear()
        self.boxes.clear()

    def saved_between(self, live: Mapping[int, int]) -> set[int | None]:
        """Return the storages of ``live`` that blocks had in common with operations between them, which save them."""
        alive = {self._account.serial(tensor) for held in self._activations if (tensor := held()) is not None}
        others = {self._account.serial(tensor) for tensor in (*self._shared, *self._leaves.values())}
        others |= {self._account.serial(tensor) for tensor in self._handed} - alive
        return (self._interfaces & live.keys() & self.before_loss) - self._copies - others

    def retained_bytes(self) -> int:
        """Return the bytes of gradients that outputs of blocks retain, and of leaves with theirs.

        A leaf lives as long as the graph, which the next forward begins beside: its caller still has the loss.
        """
        alive = {id(tensor): tensor for held in self._activations if (tensor := held()) is not None}
        retained = sum(tensor.nbytes for tensor in alive.values() if tensor.retains_grad)
        return retained + 2 * sum(leaf.nbytes for leaf in self._leaves.values())

    def run(
        self,
        index: int,
        block: Block,
        original: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        containers: Containers,
    ) -> Any:
        """Run one block."""
        recorder = self._recorder
        current = self._account.current  # first: it takes off what has died
        seam = Seam(forward=self._account.peak - current)
        self.seams.append(seam)
        cutter, known = recorder.cutters[index], len(recorder.by_signature)
        call = self._call(block, args, kwargs, cutter, containers, seam)
        self.calls.append(call)
        if cutter is not None and len(recorder.by_signature) > known:
            with recorder.stage(block.module), within(call.contexts):
                recorder.boundary.check_samples(index, call, original)
        original = original if cutter is None else in_parts(original, cutter)
        last = self.complete
        if last:
            # They are blocks', even those that the model's own code has in its variables only: it is not the loss that
            # gives them back.
            self._shared += [leaf.detach() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._handed = [tensor.detach() for held in self._activations if (tensor := held()) is not None]
            live = self._account.live()
            self.masks = live.keys() - self._interfaces
            self.between = sum(live[serial] for serial in self.masks)
        with recorder.stage(block.module), within(call.contexts):  # no cast of a weight outlives its block
            out = recorder.boundary.run(index, call, original, args, kwargs)
        # What the model has let go of by now must be gone when memory in use is read below.
        del args, kwargs
        self._interfaces |= {self._account.serial(t) for t in tree_leaves(out) if isinstance(t, Tensor)}
        if last:
            outputs = {self._account.serial(t): t.untyped_storage().nbytes() for t in _numbers(out)}
            self.output_bytes = sum(outputs.values())
            self.below = self._account.current - self.output_bytes
            self.before_loss = self._account.live().keys() - outputs.keys()
            self._account.reset_peak()
            recorder.meter.lap()
        if call.has_backward:
            position = itertools.count()
            boxes = [] if self.complete else self.boxes
            out = tree_map(lambda leaf: recorder.connect(leaf, index, call.reached, position, boxes), out)
        self._activations += [weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._ends += [get_gradient_edge(t) for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        self._last_output = BlockOutput(out)
        if last:
            recorder.watch.begin(out)
        else:
            self._account.reset_peak()
        return out

    def _call(
        self,
        block: Block,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cutter: Cutter | None,
        containers: Containers,
        seam: Seam,
    ) -> Call:
        """Return the call, the same for blocks that cost the same; fill in what came before it."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [(slot, leaf) for slot, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        slots = activations_of(leaves, spec.child(0).num_leaves)
        needs_grad = tuple(leaves[slot].requires_grad for slot in slots)
        self.chained.append(self._last_output.sources([leaves[slot] for slot in slots]) is not None)
        self._differentiate([leaves[slot] for slot in slots], seam)
        for slot, leaf in tensors:
            if slot in slots:
                serial = self._account.serial(leaf)
                self._interfaces.add(serial)
                self._users[serial] += leaf.requires_grad
                self._sizes[serial] = leaf.nbytes
                self._graph.append(leaf.grad_fn)
                self._activations.append(weakref.ref(leaf))
            else:
                self._shared.append(leaf)
        given = {self._account.serial(leaf) for _, leaf in tensors}
        elsewhere = self._interfaces - given - self._copies
        seam.lingering = sum(size for serial, size in self._account.live().items() if serial in elsewhere)
        parameters = list(block.module.parameters())
        signature = (
            repr(block.module),
            is_compiled(block.module),
            tuple(module.training for module in block.module.modules()),
            tuple((p.shape, p.dtype, p.requires_grad) for p in parameters),
            tuple(_describe(leaf) for leaf in leaves),
            spec,
            needs_grad,
            ambient(),
            cutter is None,
        )
        key = repr(signature)
        if key not in self._recorder.by_signature:
            self._recorder.by_signature[key] = Call(
                module=block.module,
                leaves=[self._own(leaf, copy=slot in slots) for slot, leaf in enumerate(leaves)],
                spec=spec,
                slots=slots,
                needs_grad=needs_grad,
                has_backward=any(needs_grad) or any(p.requires_grad for p in parameters),
                contexts=ambient(),
                reached={0},
                cutter=cutter,
                containers=containers.apart(),
            )
        return self._recorder.by_signature[key]

    def _differentiate(self, inputs: Sequence[Tensor], seam: Seam) -> None:
        """Run the backward of what came before a block, unless that is the users' own code, and count its bytes."""
        roots = [leaf for leaf in inputs if leaf.requires_grad]
        nodes = [get_gradient_edge(leaf).node for leaf in roots]
        nodes += [node for node, _ in edges(nodes)]
        rest, staying = self._recorder.rest, {id(p) for p in self._recorder.rest} | {id(self._recorder.anchor)}
        leaves = {id(node.variable): node.variable for node in nodes if hasattr(node, "variable")}
        leaves = {key: leaf for key, leaf in leaves.items() if key not in staying}
        self._leaves |= leaves
        between = [node for node in nodes if not hasattr(node, "variable") and not _is_interface(node)]
        if self.chained[-1] or any(isinstance(node, BackwardCFunction) for node in between):
            return
        rest = [p for p in rest if p.requires_grad]
        alive = [tensor for held in self._activations if (tensor := held()) is not None]
        watched = [*roots, *rest, *leaves.values(), *alive]
        if not between or any(map(tensor_hooks_of, watched)):
            return
        before = self._account.current
        self._account.reset_peak()
        found = torch.autograd.grad(
            roots,
            [*rest, *leaves.values(), *self._ends],
            [torch.zeros_like(root) for root in roots],
            retain_graph=True,
            allow_unused=True,
        )
        seam.backward = self._account.peak - before
        seam.rest = [p for p, gradient in zip(rest, found, strict=False) if gradient is not None]

    def _own(self, leaf: Any, *, copy: bool) -> Any:
        """Return an argument as a call keeps it: a copy of an activation, so that the model's own may be freed."""
        if not isinstance(leaf, Tensor):
            return leaf
        given = leaf.detach()
        own = given.clone() if copy else given
        # A copy of a tensor with gaps or repeated rows lies in memory otherwise, and kernels are chosen by that.
        if own is given or own.stride() != leaf.stride():
            return given
        self._copies.add(self._account.serial(own))
        self._interfaces |= self._copies
        return own


def find_loss(result: Any) -> Tensor | None:
    """Return the loss in what a model or a training step returned, if there is one."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", result[0] if isinstance(result, Sequence) and result else None)
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def _is_interface(node: Any) -> bool:
    return bool(node.name() == f"{Interface.__name__}Backward")


def _numbers(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _describe(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
