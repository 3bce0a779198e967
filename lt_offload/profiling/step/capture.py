"""The first pass of a model: one run, to learn what its blocks are called with and what happens outside them.

Each block runs with a graph of its own, which is dropped when it returns, so that the activations of one block at most
are kept; what lies between blocks and after the last one (the loss) runs as in training. A use that then still reaches
a block's graph by another way than its output cannot be trained exactly: see ``boundary_check.py``.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload import limits
from lt_offload.compat.torch import tree_leaves, tree_map
from lt_offload.errors import ModelError
from lt_offload.machine.accounting import Account, storage_bytes
from lt_offload.model.blocks import Block, CalledOtherwise, Structure
from lt_offload.model.calls import Call
from lt_offload.model.compiled import Forward, intercept, uncompiled
from lt_offload.model.parts import Cutter, cutters
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.handed import Containers, Handed
from lt_offload.profiling.meters import Meter
from lt_offload.profiling.step.allowed import WrittenWeights
from lt_offload.profiling.step.boundary_check import BoundaryCheck, Interface
from lt_offload.profiling.step.logits import AfterLoss, LogitsWatch, Tail
from lt_offload.profiling.step.model_call import ModelCall, Seam
from lt_offload.schema.profile import OptionName

Run = Callable[[Any], Any]
Stage = Callable[[nn.Module], AbstractContextManager[None]]
Aside = Callable[[], AbstractContextManager[None]]


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
        recorder = CallRecorder(structure, device, stage, meter, aside, cutters(structure, micro_batches))
        for index, block in enumerate(structure.blocks):
            stack.callback(intercept(block.module, recorder.wrap(index, block)))
        stack.callback(recorder.watch.install())
        with recorder.account, torch.enable_grad():
            with WrittenWeights(structure), whole_backwards():
                result = run(batch)
            return recorder.finish(result)


@contextmanager
def whole_backwards() -> Iterator[None]:
    """Refuse by name that a step differentiates through blocks: here, where they have no graph, torch finds no way."""
    try:
        yield
    except RuntimeError as error:
        if "differentiated Tensor" in str(error):
            raise limits.PARTIAL_BACKWARD.error("the step calls torch.autograd.grad") from error
        raise


class CallRecorder:
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
        self.device = device
        self.by_signature: dict[object, Call] = {}
        self.anchor = torch.zeros((), requires_grad=True)
        self._aside = aside
        self._forwards: list[ModelCall] = []
        """With gradients."""
        self._followed = False
        """The last of them was followed by one without."""
        self._called: list[int] = []
        """Blocks that have been called with gradients, in turn."""
        self._otherwise = False
        """They are not those of the structure: only their order is of interest."""

    def wrap(self, index: int, block: Block) -> Forward:
        """Return what is called instead of the block."""
        original = self._code(block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            handed = Handed(args, kwargs)
            if self.device.type != "cpu":
                handed.bring(block, self.device)
            args, kwargs = handed.args, handed.kwargs
            run = handed.around(original)
            if not torch.is_grad_enabled():
                self._followed = bool(self._called)
                with self._aside(), self.stage(block.module), within(ambient()):
                    return handed.returned(run(*args, **kwargs))
            again = index in self._called
            self._called.append(index)
            with self._aside() if again else nullcontext():
                return handed.returned(self._run(index, block, run, args, kwargs, handed.containers, again=again))

        return forward

    def _code(self, block: Block) -> Forward:
        """Return what runs a block: what it returns looks the same uncompiled, and nothing is compiled too early."""
        return uncompiled(block.module)

    def _run(
        self,
        index: int,
        block: Block,
        run: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        containers: Containers,
        *,
        again: bool,
    ) -> Any:
        """Run a block with gradients; ``again``: not for the first time."""
        if not self._in_turn(index):
            self._otherwise = True
            return self._pass_by(index, block, run, args, kwargs)
        if not self._forwards or (index == 0 and self._forwards[-1].complete):
            self._begin()
        return self._forwards[-1].run(index, block, run, args, kwargs, containers=containers)

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
            note = partial(_note, reached, next(position))
            # The anchor requires grad, so that the output does: nothing else that the outer graph knows leads here.
            return Interface.apply(self.anchor, box, index, note)  # type: ignore[no-untyped-call]
        return leaf

    def _check_order(self) -> None:
        """Raise unless the blocks were called in turn, naming those that are."""
        if not self._otherwise and self._forwards and self._forwards[-1].complete:
            return
        _, turn = in_turn(self.blocks, self._called)
        names = [self.blocks[index].name for index in turn]
        raise CalledOtherwise(
            f"the model calls its blocks in another order each time, at first {', '.join(names)}; they must be called "
            "in the same order",
            [self.blocks[index] for index in turn],
        )

    def _begin(self) -> None:
        if self._forwards:
            self.watch.forgo()
        self._forwards.append(ModelCall(self))
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
            self.boundary.check_gradients(loss)
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
        largest.settle()
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


def find_loss(result: Any) -> Tensor | None:
    """Return the loss in what a model or a training step returned, if there is one."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", result[0] if isinstance(result, Sequence) and result else None)
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def _note(reached: set[int], position: int, _number: int) -> None:
    reached.add(position)


def in_turn(blocks: Sequence[Block], called: Sequence[int], apart: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """Return which calls are of blocks that are called once per forward, in one order, and that order.

    Args:
        blocks: what may be one.
        called: their indices, in the order of calls.
        apart: those that are none.

    Raises:
        CalledOtherwise: if there is no layer.
        ModelError: if layers are called more than once, or in another order in a later forward.
    """
    times = Counter(called)
    layers = [index for index, block in enumerate(blocks) if block.kind == "layer" and index not in apart]
    if not any(times[index] for index in layers):
        uncalled = ", ".join(blocks[index].name for index in layers)
        raise CalledOtherwise(f"the model's forward has called none of its layers, {uncalled}", ())
    forwards = min(times[index] for index in layers if times[index])
    # What is called more often has no place in the sequence, nor has what owns the same tensors.
    others = {index for index in times if times[index] != forwards or index in apart}
    tensors = {tensor for index in others for tensor in blocks[index].tensors}
    visits = [at for at, i in enumerate(called) if i not in others and tensors.isdisjoint(blocks[i].tensors)]
    turn = [called[at] for at in visits[: len(visits) // forwards]]
    for index in dict.fromkeys(called):
        if blocks[index].kind == "layer" and index not in turn and index not in apart:
            raise ModelError(
                f"the model calls block {blocks[index].name} {times[index]} times in {forwards} forwards, or shares "
                "its weights with one that it calls more often; layers must be called once each"
            )
    if [called[at] for at in visits] != turn * forwards:
        names = ", ".join(blocks[index].name for index in turn)
        raise ModelError(f"the model calls its blocks in another order than {names} in a later forward")
    return visits, turn
