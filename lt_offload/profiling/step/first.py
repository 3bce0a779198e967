"""The first step of a training, watched while it counts: its calls of blocks, and the computations outside them.

Each call of a block is handed to whoever makes it a part of the outer graph. What the loss's backward costs is seen
when it comes to the first block, and then the blocks are measured; there is no plan before that.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.torch import tree_leaves
from lt_offload.errors import ModelError, OverBudget
from lt_offload.machine.accounting import Account
from lt_offload.machine.driver import context_bytes, current, warm_up
from lt_offload.model.blocks import Block, CalledOtherwise, Structure, as_called
from lt_offload.model.calls import Call, edges, is_block_node
from lt_offload.model.compiled import Forward, called, intercept, uncompiled
from lt_offload.model.head import HeadLoss
from lt_offload.model.location import staged
from lt_offload.model.parts import check_samples, cutters, extent
from lt_offload.model.quantized import tensors_of
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.generators import generators_kept
from lt_offload.model.state.handed import Handed
from lt_offload.model.state.hooks import silenced
from lt_offload.profiling.assemble import Capture, Measured, Progress, assemble, at_least
from lt_offload.profiling.block_cost import BlockCost, measure_block, measure_with_loss
from lt_offload.profiling.host_reads import Readers
from lt_offload.profiling.machine import MeasuredMachine
from lt_offload.profiling.meters import Meter, Stopwatch
from lt_offload.profiling.optimizer import UpdateSizes
from lt_offload.profiling.step.boundary_check import BoundaryCheck, WrittenWeights, mark_reached, runnable
from lt_offload.profiling.step.logits import AfterLoss, LogitsWatch, Tail, calls_with_loss
from lt_offload.profiling.step.model_call import ModelCall
from lt_offload.schema.profile import Profile

Run = Callable[[Any], Any]
Join = Callable[..., Any]
"""Runs a block and makes it a part of the outer graph: see ``Survey.forward`` in ``execute/training/survey.py``."""


class LossWithBlock(Protocol):
    """Lets the last block run where the model calls its loss: ``LossInBlock`` in ``execute/user_code/logits.py``."""

    module: HeadLoss

    def install(self, run: Forward) -> Callable[[], None]:
        """Call ``run`` in place of the model's loss; return a function that ends that."""

    def deferring(self, run: Forward) -> Forward:
        """Return the function that is called in place of the block."""


class FirstStep:
    """The first step of a model's training, or one on trial, which only measures or checks.

    ``structure`` is what may be the blocks of the model. Without an ``optimizer`` the step has no profile. ``meter``
    tells what a run costs; None: a stopwatch. ``loss`` computes the last block together with the model's loss; None:
    the model does. ``code`` returns what runs a block.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        optimizer: Optimizer | None,
        device: torch.device,
        machine: MeasuredMachine | None = None,
        *,
        meter: Meter | None = None,
        parts: int = 1,
        loss: LossWithBlock | None = None,
        code: Callable[[nn.Module], Forward] = called,
        say: Progress = lambda _message: None,
    ) -> None:
        self._optimizer, self._machine, self.meter = optimizer, machine, meter or Stopwatch(device)
        self.model, self.structure, self.device, self.parts = model, structure, device, parts
        self.batch: Any = None
        self._with_loss, self._code, self._say = loss, code, say
        self._readers = Readers(structure)
        self.account = Account(device_type=device.type, timeline=True)
        self.blocks, self.cutters = structure.blocks, cutters(structure, parts)
        self.boundary = BoundaryCheck(structure, self._readers)
        self.after = AfterLoss(self.account, self.meter, [parameter for _, parameter in structure.rest])
        self.watch = LogitsWatch(structure, self.after.begin)
        self.by_signature: dict[object, Call] = {}
        self._followed = False
        """The last forward with gradients was followed by one without."""
        self._called: list[int] = []
        """Blocks that have been called with gradients, in turn."""
        self.calls = ModelCall(self)
        self.rest: list[nn.Parameter] = []
        """All weights: a module whose weights the step uses beside its call is no block."""
        self._before: set[nn.Parameter] = set()
        self._tail: Tail | None = None
        self._loss: Tensor | None = None
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
        self._captured: Capture | None = None
        self.order: dict[int, int] = {}
        """The blocks of the profile, by the indices that they had in ``structure``."""
        self.forwards: list[list[int]] = []
        """The calls of each forward, as positions among all calls of blocks."""

    # -- the forward ---------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, batch: Any, join: Join) -> Iterator[None]:
        """Enclose the forward of the step on ``batch``, which is on the device; ``join`` runs each block."""
        check_samples(batch, self.parts)
        self.batch, self.join, device = batch, join, self.device
        if device.type == "cuda":
            with current(device):
                warm_up(device)  # or the first block would be charged for the libraries' workspaces
        self.rest = list(self.model.parameters())
        self._before = {p for p in self.rest if p.grad is not None}
        with ExitStack() as stack:
            stack.enter_context(runnable(self.structure))
            stack.enter_context(self._readers)
            for index, block in enumerate(self.blocks):
                run = self._wrap(index, block)
                if self._with_loss is not None and index == len(self.blocks) - 1:
                    both = self._wrap(index, replace(block, module=self._with_loss.module))
                    stack.callback(self._with_loss.install(both))
                    run = self._with_loss.deferring(run)
                stack.callback(intercept(block.module, run))
            for other in _others(self.structure):
                for module in (block.module for block in other.blocks if block.kind == "layer"):
                    note = module.register_forward_pre_hook(lambda layer, _args: self._layers.add(layer))
                    stack.callback(note.remove)
            stack.callback(self.watch.install())
            stack.enter_context(self.account)
            stack.enter_context(WrittenWeights(self.structure))
            stack.enter_context(self._in_memory())
            yield

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.batch is None:  # there is a plan, whose engine says what it needs
                raise
            samples, length = extent(self.batch)
            raise OverBudget(
                f"{samples} samples of {length} tokens, with which the model was to be measured: one block or the loss "
                f"takes more memory for them than {self.device} has left; lower the batch size or the length, or raise "
                "memory"
            ) from error

    def stage(self, module: nn.Module) -> Any:
        """Return a context in which the parameters of ``module`` are on the device."""
        return staged(tensors_of(module), self.device)

    def _wrap(self, index: int, block: Block) -> Forward:
        original = self._code(block.module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            handed = Handed(args, kwargs)
            if self.device.type != "cpu":
                handed.bring(block, self.device)
            args, kwargs = handed.args, handed.kwargs
            run = handed.around(original)
            if not torch.is_grad_enabled():
                self._followed = bool(self._called)
                with self._readers.paused(), self.stage(block.module), within(ambient()):
                    return handed.returned(run(*args, **kwargs))
            # Before it runs at all: hooks for saved tensors would be called.
            limits.check_call(block.name, kwargs)
            again = index in self._called
            self._called.append(index)
            with self._readers.paused() if again else nullcontext():
                if again and index == len(self.blocks) - 1:
                    self.watch.forgo()
                self._followed = False
                return handed.returned(self.calls.run(index, block, run, args, kwargs, containers=handed.containers))

        return forward

    def returned(self, result: Any) -> Structure | None:
        """Note the step's result; refuse a step that could not be trained exactly.

        Returns what else may be the model's blocks, if the step has called none of the layers.
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
            return None
        layers = {index for index, block in enumerate(self.blocks) if block.kind == "layer"}
        if layers.isdisjoint(self._called):
            for other in _others(self.structure):
                if any(block.kind == "layer" and block.module in self._layers for block in other.blocks):
                    return other
            in_turn(self.blocks, self._called)  # says so
            return None
        self.boundary.check_consumers(loss)
        for name, parameter in self.structure.tensors:
            if parameter.grad is not None and parameter not in self._before:
                raise limits.SET_GRADIENT.error(f"weight {name} has a gradient before the backward")
        self.boundary.check_inside(loss)
        try:
            self.boundary.check_gradients(loss, self._before)
        except CalledOtherwise as otherwise:
            # These stay on the device, where the loss can use them.
            kept = {block.module for block in otherwise.blocks}
            self._apart |= {index for index, block in enumerate(self.blocks) if block.module not in kept}
        mark_reached([(loss.grad_fn, 0)])
        ends = {(id(node), number) for node, number in edges([loss.grad_fn], outer=True) if is_block_node(node)}
        others = ((edge, nbytes) for edge, nbytes in calls.ends.items() if edge not in calls.last_ends)
        self._arrived = sum(nbytes for edge, nbytes in others if (id(edge.node), edge.output_nr) in ends)
        return None

    # -- the backward, and its end ------------------------------------------------------------------------------------

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Enclose the backward of the step."""
        with self.account, self._in_memory():
            self.account.reset_peak()
            self.meter.lap()
            yield

    def reached(self) -> Capture:
        """Return the record of the step; to be called first when its backward has come to the first block."""
        if self._captured is not None:
            return self._captured
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
        visits, turn = in_turn(self.blocks, self._called, self._apart)
        length, same = len(turn), turn == list(range(len(self.blocks)))
        structure = self.structure if same else as_called(self.model, [self.blocks[index] for index in turn])
        order = {index: at for at, index in enumerate(turn)}
        forwards = [visits[at : at + length] for at in range(0, len(visits), length)]
        # What the loss has made, or blocks have returned, and is still there: somebody holds it beyond the step.
        calls.let_go()
        gc.collect()  # an error that was caught holds what was there when it was raised
        own = [leaf for call in self.by_signature.values() for leaf in call.leaves if isinstance(leaf, Tensor)]
        own += [p.grad for p in self.rest if p.grad is not None]
        left = self._live.keys() & self.account.live().keys() - {self.account.serial(tensor) for tensor in own}
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
        with_loss = isinstance(last.module, HeadLoss)
        if with_loss and len(forwards) > 1:
            raise limits.LOSS_IN_CHUNKS.error(f"a step calls the model {len(forwards)} times")
        others = {at for at, index in enumerate(self._called) if index not in order}
        for seam in calls.seams:
            seam.lingering = sum(size for serial, size in seam.live.items() if serial not in calls.masks)
        begin = max((visits[-1] + 1 for visits in forwards if visits[-1] < largest[0]), default=0)
        held_bytes, lasting_bytes = self._bytes(held), self._bytes(lasting) + calls.retained_bytes() + self._arrived
        deferred_bytes = sum(calls.waiting_bytes(visits) for visits in waiting)
        deferred_bytes += 2 * sum(calls.several_bytes_of(visits) for visits in forwards)
        self._captured = Capture(
            structure=structure,
            others=[
                (min(bisect_left(largest, at), len(largest) - 1), calls.calls[at])
                for at in sorted(others)
                if begin <= at <= largest[-1]
            ],
            calls=tuple(calls.calls[at] for at in largest),
            chained=tuple(calls.chained[at] for at in largest),
            seams=tuple(calls.seam_before(at, others) for at in largest),
            outside=calls.between + self._bytes(self._saved - self._kept) + held_bytes + lasting_bytes + deferred_bytes,
            once=tuple(index in once for index in range(len(structure.blocks))),
            # The peak of the forward keeps the result: until it returns, the caller may hold the last batch's result
            # beside the new one.
            tail=replace(
                tail,
                saved=tail.saved - held_bytes,
                backward_peak=tail.backward_peak - held_bytes - self._arrived,
                left=tail.left - held_bytes - self._arrived,
            ),
            after=self.after.tail,
            with_loss=calls_with_loss(last) if with_loss else self.watch.calls(last),
            forwards=len(forwards),
            deferred=len(waiting),
        )
        self._check_forwards(self.parts)
        self.structure, self.order, self.forwards = structure, order, forwards
        return self._captured

    def _bytes(self, serials: Set[int | None]) -> int:
        return sum(nbytes for serial, nbytes in self._live.items() if serial in serials)

    def let_go(self) -> None:
        """Let go of the arguments of blocks, and of the graph, which leads back to here: no more is measured."""
        self.batch = self._captured = None
        self.by_signature.clear()
        self.calls.forget()
        self.boundary.let_go()
        self._loss = None

    # -- costs ---------------------------------------------------------------------------------------------------------

    def host_room(self, budget: int) -> int:
        """Return the RAM that training leaves for activations, of ``budget`` bytes, wherever its states are."""
        assert self._optimizer is not None and self._machine is not None
        sizes = UpdateSizes(self._optimizer, self.device, scratch_ratio=0.0)
        host = (p.nbytes + (p.nbytes + sizes.state(p) if p.requires_grad else 0) for p in self.model.parameters())
        return max(0, budget - self._machine.hardware.process_bytes - sum(host))

    def profile(self, parts: int, optimizer: Optimizer | None = None) -> Profile:
        """Measure the blocks and return the profile; to be called when the backward has come to the first block.

        ``parts``: of the batch. ``optimizer``: that is to be used, with all weights that train now; None: that of the
        step. Raises ``ModelError`` or ``UnsupportedError`` if the model cannot be trained exactly, and ``OverBudget``
        if a GPU has no memory for one block of the batch.
        """
        device, used = self.device, optimizer or self._optimizer
        assert used is not None and self._machine is not None
        hardware, updates, contention = self._machine
        # Blocks draw while they are measured: the training would go on with other numbers than without measuring.
        kept = generators_kept([device.index] if device.type == "cuda" else [])
        with current(device), kept, torch.enable_grad():
            measured = self.costs(parts, unfrozen=used is not self._optimizer)
            if device.type == "cuda":  # by now all kernels are there
                hardware = replace(hardware, context_bytes=max(hardware.context_bytes, context_bytes(device)))
            ratio = updates.scratch_ratio if device.type == "cuda" else 0.0
            sizes = UpdateSizes(used, device, scratch_ratio=ratio)
            profile = assemble(self.model, self.batch, measured, sizes=sizes, updates=updates, hardware=hardware)
        return replace(profile, contention=contention)

    def costs(self, parts: int, *, unfrozen: bool = False) -> Measured:
        """Measure the blocks, with a batch in so many ``parts``; ``unfrozen``: more weights train now than in the step.

        Raises ``UnsupportedError`` if a block cannot take the batch in parts, and ``OverBudget`` if a GPU has no memory
        for one block of the batch.
        """
        captured, device, meter = self.reached(), self.device, self.meter
        self._check_forwards(parts)
        structure, readers = captured.structure, self._readers.of(captured.structure)
        again = [call.unrecorded for call in captured.calls]
        with ExitStack() as stack:
            stack.enter_context(self._in_memory())
            stack.enter_context(runnable(structure))
            if device.type == "cuda":
                warm_up(device)
            captured = replace(self._with_others(captured), calls=self._calls(captured, parts, unfrozen=unfrozen))
            with_loss, known = list[BlockCost](), dict[int, BlockCost]()
            for name, call in captured.with_loss.items():
                assert isinstance(call.module, HeadLoss)
                with self._alone(call, name):
                    with_loss.append(measure_with_loss(call, name, call.module.chunk, meter))
            apart = [call for call in captured.calls if not isinstance(call.module, HeadLoss)]
            # Blocks that cost the same share a call. Where one of them may run again, the options for that have to be
            # measured; blocks that must not run again leave these options out (``assemble``).
            repeatable = {id(call) for call, once in zip(apart, captured.once, strict=False) if not once}
            kinds = {id(call): call for call in apart}
            for key, call in kinds.items():
                with self._alone(call, f"{len(known) + 1} of {len(kinds)} kinds of blocks"):
                    known[key] = measure_block(call, meter, once=key not in repeatable)
            costs = [known[id(call)] for call in apart]
            for at, cost in enumerate(costs):
                if again[at]:  # its first backward runs the forward again, whatever is planned
                    options = (at_least(option, option.forward_peak_bytes, ()) for option in cost.options)
                    costs[at] = replace(cost, options=tuple(options))
            if len(costs) < len(captured.calls):  # the last block is computed with the loss, in no other way
                costs.append(replace(with_loss[0], options=()))
            if device.type == "cuda":
                readers.measure_on(device, meter, self._say)
        return Measured(captured=captured, costs=costs, with_loss=with_loss, readers=readers, parts=parts)

    @contextmanager
    def _alone(self, call: Call, what: str = "") -> Iterator[None]:
        """Enclose runs of a block that only measure, unseen by users' hooks; ``what`` it is the user is told."""
        if what:
            self._say(f"measuring {type(call.module).__name__} ({what})")
        # As the module was at its call: the step has run on since, and may have changed what the block reads.
        with self.stage(call.module), call.as_called(), silenced(call.module):
            yield

    def _check_forwards(self, parts: int) -> None:
        if parts > 1 and self.reached().deferred:
            raise limits.MICRO_BATCHES.error("a step calls the model again before the backward of an earlier call")

    def _calls(self, captured: Capture, parts: int, *, unfrozen: bool) -> tuple[Call, ...]:
        """Return the calls of blocks that take the batch in so many ``parts``; ``unfrozen``: with more gradients."""
        known: dict[object, Call] = {}
        calls: list[Call] = []
        trains = False
        for block, call, cutter in zip(
            captured.structure.blocks, captured.calls, cutters(captured.structure, parts), strict=True
        ):
            key = id(call), cutter is None, trains
            if key not in known:
                if parts != self.parts:  # what it has given as a whole is not what its parts give
                    call = replace(call, cutter=cutter, rehearsed=[])
                own = any(parameter.requires_grad for parameter in block.module.parameters())
                # Behind a block that trains only now, inputs have gradients that the step has not shown.
                if unfrozen:
                    needs_grad = tuple(need or trains for need in call.needs_grad)
                    call = replace(call, needs_grad=needs_grad, has_backward=own or any(needs_grad))
                    trains = trains or own
                known[key] = call
                if cutter is not None and parts != self.parts:
                    with self.stage(block.module), silenced(block.module), within(call.contexts):
                        self.boundary.check_samples(block, call, call.around(uncompiled(block.module)))
            calls.append(known[key])
        return tuple(calls)

    def _with_others(self, captured: Capture) -> Capture:
        """Return the capture, with the costs of modules that were called as blocks and are none.

        They ran as blocks, so that what they save was on the host; from now on they are part of the model's own code.
        """
        seams, outside = list(captured.seams), captured.outside
        for at, call in captured.others:
            with self._alone(call):
                keep = measure_block(call, self.meter, once=True).options[0]
            trained = [p for p in call.module.parameters() if p.requires_grad]
            most = keep.saved_bytes + keep.backward_peak_bytes + max((p.nbytes for p in trained), default=0)
            seams[at] = replace(
                seams[at],
                forward=max(seams[at].forward, keep.saved_bytes + keep.forward_peak_bytes),
                backward=max(seams[at].backward, most),
                rest=[*seams[at].rest, *trained],
            )
            outside += keep.saved_bytes
        return replace(captured, seams=tuple(seams), outside=outside)


def find_loss(result: Any) -> Tensor | None:
    """Return the loss in what a model or a training step returned, if there is one."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", result[0] if isinstance(result, Sequence) and result else None)
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def in_turn(blocks: Sequence[Block], called: Sequence[int], apart: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """Return the calls of blocks that are called once per forward, in one order, and that order.

    ``apart`` are none. Raises ``CalledOtherwise`` if there is no layer, and ``ModelError`` if layers are called more
    than once, or in another order in a later forward.
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


def _others(structure: Structure) -> Iterator[Structure]:
    other = structure.other
    while other is not None and (choice := other()) is not None:
        yield choice
        other = choice.other
