"""The first step of a training, watched while it counts: its calls of blocks, and the computations outside them.

Each call of a block is handed to whoever makes it a part of the outer graph. What the loss's backward costs is seen
when it comes to the first block; there is no plan before that.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lt_offload import limits
from lt_offload.compat.torch import tree_leaves
from lt_offload.machine.accounting import Account
from lt_offload.model.blocks import Block, CalledOtherwise, Structure, as_called
from lt_offload.model.calls import Call, edges, is_block_node
from lt_offload.model.compiled import Forward, called, intercept
from lt_offload.model.head import HeadLoss
from lt_offload.model.parts import cutters
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.handed import Handed
from lt_offload.profiling.meters import Meter
from lt_offload.profiling.step.allowed import WrittenWeights
from lt_offload.profiling.step.boundary_check import BoundaryCheck, mark_reached
from lt_offload.profiling.step.capture import Aside, Capture, Stage, find_loss, in_turn, whole_backwards
from lt_offload.profiling.step.logits import AfterLoss, LogitsWatch, Tail
from lt_offload.profiling.step.model_call import ModelCall

Join = Callable[..., Any]
"""Runs a block and makes it a part of the outer graph: see ``Survey.forward`` in ``execute/training/survey.py``."""


class LossWithBlock(Protocol):
    """Lets the last block run where the model calls its loss: ``LossInBlock`` in ``execute/user_code/logits.py``."""

    module: HeadLoss

    def install(self, run: Forward) -> Callable[[], None]:
        """Call ``run`` in place of the model's loss; return a function that ends that."""

    def deferring(self, run: Forward) -> Forward:
        """Return the function that is called in place of the block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surveyed:
    """The results of watching a step."""

    structure: Structure
    """The blocks in the order of their calls."""
    order: dict[int, int]
    """New index of each block, by its old one."""
    forwards: list[list[int]]
    """The calls of each forward of the model, as positions among all calls of blocks."""
    capture: Capture
    unrecorded: Set[int]
    """Its calls of which a run has kept no graph, by their identity."""
    others: list[tuple[int, Call]]
    """Calls of modules that turned out to be no blocks, in the largest forward, each with the block that follows it."""


class StepRecorder:
    """Stands between the model and its blocks in the first step.

    Args:
        model: that is trained.
        structure: what may be its blocks.
        device: where they run.
        stage: context in which a block's parameters are on the device.
        meter: tells the time of the tail.
        aside: encloses every run of a block beyond the one that the model asked for.
        join: runs a block.
        parts: of the batch, which go through each block in turn.
        loss: computes the last block together with the model's loss; None: the model does.
        code: returns what runs a block.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        device: torch.device,
        stage: Stage,
        meter: Meter,
        aside: Aside,
        join: Join,
        parts: int,
        loss: LossWithBlock | None,
        code: Callable[[nn.Module], Forward] = called,
    ) -> None:
        self.account = Account(device_type=device.type, timeline=True)
        self.blocks, self.device = structure.blocks, device
        self.cutters = cutters(structure, parts)
        self.stage, self.meter = stage, meter
        self.boundary = BoundaryCheck(structure, aside)
        self.after = AfterLoss(self.account, meter, [parameter for _, parameter in structure.rest])
        self.watch = LogitsWatch(structure, self.after.begin)
        self.by_signature: dict[object, Call] = {}
        self._aside = aside
        self._followed = False
        """The last forward with gradients was followed by one without."""
        self._called: list[int] = []
        """Blocks that have been called with gradients, in turn."""
        self.join, self._with_loss, self._code = join, loss, code
        self.calls = ModelCall(self)
        self._model, self._structure = model, structure
        self.rest = list(model.parameters())  # a module whose weights the step uses beside its call is no block
        self._before = {p for p in model.parameters() if p.grad is not None}
        self._tail: Tail | None = None
        self._loss: Tensor | None = None
        self.elsewhere: Structure | None = None
        """Another choice of the model's blocks, if the step has called none of the layers."""
        self._layers: set[nn.Module] = set()
        """Layers of other choices that the step has called."""
        self._apart: set[int] = set()
        """Blocks that the step uses in another way."""
        self._in_graph: set[int | None] = set()
        """Storages that operations outside the blocks save."""
        self._kept: set[int | None] = set()
        self._arrived = 0
        """Bytes of gradients that the loss itself gives blocks before the last one."""
        self._live: dict[int, int] = {}

    def wrap(self, index: int, block: Block) -> Forward:
        """Return the function that is called instead of the block."""
        original = self._code(block.module)

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
                if again and index == len(self.blocks) - 1:
                    self.watch.forgo()
                self._followed = False
                return handed.returned(self.calls.run(index, block, run, args, kwargs, containers=handed.containers))

        return forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enclose the forward of the step."""
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                run = self.wrap(index, block)
                if self._with_loss is not None and index == len(self.blocks) - 1:
                    both = self.wrap(index, replace(block, module=self._with_loss.module))
                    stack.callback(self._with_loss.install(both))
                    run = self._with_loss.deferring(run)
                stack.callback(intercept(block.module, run))
            for other in _others(self._structure):
                for module in (block.module for block in other.blocks if block.kind == "layer"):
                    stack.callback(module.register_forward_pre_hook(self._note_layer).remove)
            stack.callback(self.watch.install())
            stack.enter_context(self.account)
            stack.enter_context(WrittenWeights(self._structure))
            stack.enter_context(whole_backwards())
            yield

    def _note_layer(self, module: nn.Module, _args: Any) -> None:
        self._layers.add(module)

    def _calls_layers(self, structure: Structure) -> bool:
        return any(block.kind == "layer" and block.module in self._layers for block in structure.blocks)

    def returned(self, result: Any) -> None:
        """Note the step's result; refuse a step that could not be trained exactly.

        Raises:
            UnsupportedError: naming the block or weight, see ``boundary_check.py``.
        """
        lap, calls = self.meter.lap(), self.calls
        self.watch.end(result)
        self._live = live = self.account.live()
        self._kept = {self.account.serial(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        forward, peak = self.after.end(lap, self._kept)
        below = calls.below
        self._tail = Tail(forward=forward, forward_peak=peak - below, saved=self.account.current - below)
        self._loss = loss = find_loss(result)
        if loss is not None and loss.requires_grad:
            self._in_graph = {self.account.serial(tensor) for tensor in self.boundary.saved_outside(loss)}
        self._saved = calls.saved_between(live, self._in_graph)
        if loss is None or not loss.requires_grad:
            self.boundary.check_results(result)
            return
        layers = {index for index, block in enumerate(self.blocks) if block.kind == "layer"}
        if layers.isdisjoint(self._called):
            self.elsewhere = next(filter(self._calls_layers, _others(self._structure)), None)
            if self.elsewhere is None:
                in_turn(self.blocks, self._called)  # says so
            return
        self.boundary.check_consumers(loss)
        self._check_unset()
        self.boundary.check_inside(loss)
        try:
            self.boundary.check_gradients(loss, self._before)
        except CalledOtherwise as otherwise:
            # These stay on the device, where the loss can use them.
            kept = {block.module for block in otherwise.blocks}
            self._apart |= {index for index, block in enumerate(self.blocks) if block.module not in kept}
        mark_reached([(loss.grad_fn, 0)])
        ends = {(id(node), number) for node, number in edges([loss.grad_fn], outer=True) if is_block_node(node)}
        self._arrived = sum(calls.bytes_of.get(end, 0) for end in ends - calls.last_ends)

    def _check_unset(self) -> None:
        for name, parameter in self._structure.tensors:
            if parameter.grad is not None and parameter not in self._before:
                raise limits.SET_GRADIENT.error(f"weight {name} has a gradient before the backward")

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Enclose the backward of the step."""
        with self.account:
            self.account.reset_peak()
            self.meter.lap()
            yield

    def reached(self) -> Surveyed:
        """Return the survey of the step, when its backward has come to the first block.

        Raises:
            ModelError: if it calls its blocks in no order, or in another one in each forward.
            UnsupportedError: if a block that must run once is in a forward that waits for others.
        """
        tail, calls = self._tail, self.calls
        assert tail is not None
        if self._loss is None:  # the caller begins with a gradient as large as the output
            tail.backward_peak = tail.left = tail.saved + calls.output_bytes
        else:
            tail.backward = self.meter.lap()
            tail.backward_peak, tail.left = self.account.peak - calls.below, self.account.current - calls.below
        self.after.share(tail)
        self.boundary.find_rewritten()
        self.boundary.let_go()
        structure, order, forwards = self._sequence()
        # What the loss has made, or blocks have returned, and is still there: somebody holds it beyond the step.
        left = self._outliving() - {self.account.serial(p.grad) for p in self.rest if p.grad is not None}
        held = (left | self._kept) - calls.before_loss
        lasting = (left & calls.before_loss & calls.interfaces) - calls.masks - self._saved - self._in_graph
        waiting = forwards if self._followed else forwards[:-1]
        once = {order[index]: why for index, why in self.boundary.once.items() if index in order}
        if waiting and once:
            index, why = min(once.items())
            raise limits.FORWARDS.error(
                f"block {structure.blocks[index].name}, which must run once {why}, is in a forward that waits"
            )
        largest = max(forwards, key=lambda visits: sum(map(calls.input_bytes_of, visits)))
        last = calls.calls[largest[-1]]
        in_chunks = isinstance(last.module, HeadLoss)
        if in_chunks and len(forwards) > 1:
            raise limits.LOSS_IN_CHUNKS.error(f"a step calls the model {len(forwards)} times")
        others = {at for at, index in enumerate(self._called) if index not in order}
        calls.settle()
        begin = max((visits[-1] + 1 for visits in forwards if visits[-1] < largest[0]), default=0)
        return Surveyed(
            structure=structure,
            order=order,
            forwards=forwards,
            unrecorded=self.boundary.unrecorded,
            others=[
                (min(bisect_left(largest, at), len(largest) - 1), calls.calls[at])
                for at in sorted(others)
                if begin <= at <= largest[-1]
            ],
            capture=Capture(
                calls=tuple(calls.calls[at] for at in largest),
                chained=tuple(calls.chained[at] for at in largest),
                seams=tuple(calls.seam_before(at, others) for at in largest),
                between=calls.between + self._bytes(self._saved - self._kept),
                once=tuple(index in once for index in range(len(structure.blocks))),
                held=self._bytes(held),
                lasting=self._bytes(lasting) + calls.retained_bytes(),
                tail=tail,
                after=self.after.tail,
                with_loss={"chunked": last} if in_chunks else self.watch.calls(last),
                forwards=len(forwards),
                deferred=len(waiting),
                waiting=sum(calls.waiting_bytes(visits) for visits in waiting)
                + 2 * sum(calls.several_bytes_of(visits) for visits in forwards),
                arrived=self._arrived,
            ),
        )

    def _bytes(self, serials: Set[int | None]) -> int:
        """Return the bytes of ``serials`` that were alive when the step returned."""
        return sum(nbytes for serial, nbytes in self._live.items() if serial in serials)

    def let_go(self) -> None:
        """Let go of the arguments of blocks, which have been measured, and of the graph, which leads back to here."""
        self.by_signature.clear()
        self.calls.forget()
        self.boundary.let_go()
        self._loss = None

    def _outliving(self) -> set[int]:
        own = [leaf for call in self.by_signature.values() for leaf in call.leaves if isinstance(leaf, Tensor)]
        own += [draw for call in self.by_signature.values() for first in call.given for draw in first.draws]
        self.calls.let_go()
        gc.collect()  # an error that was caught holds what was there when it was raised
        return self._live.keys() & self.account.live().keys() - {self.account.serial(tensor) for tensor in own}

    def _sequence(self) -> tuple[Structure, dict[int, int], list[list[int]]]:
        """Return the blocks in the order of their calls, their new indices, and the calls of each forward."""
        blocks = self.blocks
        visits, turn = in_turn(blocks, self._called, self._apart)
        length = len(turn)
        same = turn == list(range(len(blocks)))
        structure = self._structure if same else as_called(self._model, [blocks[index] for index in turn])
        order = {index: at for at, index in enumerate(turn)}
        return structure, order, [visits[at : at + length] for at in range(0, len(visits), length)]


def _others(structure: Structure) -> Iterator[Structure]:
    """Yield other choices of a model's blocks, in the order of preference."""
    other = structure.other
    while other is not None and (choice := other()) is not None:
        yield choice
        other = choice.other
