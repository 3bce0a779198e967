"""A step of a model whose blocks are watched as they are called, and measured when the backward comes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lt_offload import limits
from lt_offload.errors import OverBudget
from lt_offload.machine.driver import current, warm_up
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import Call
from lt_offload.model.compiled import Forward, called, uncompiled
from lt_offload.model.head import HeadLoss
from lt_offload.model.location import staged
from lt_offload.model.parts import check_samples, cutters, extent
from lt_offload.model.quantized import tensors_of
from lt_offload.model.state.contexts import within
from lt_offload.model.state.effects import Effects
from lt_offload.model.state.hooks import silenced
from lt_offload.profiling.assemble import Measured, Progress, at_least, block_costs, costs_with_loss
from lt_offload.profiling.block_cost import BlockCost, measure_block
from lt_offload.profiling.host_reads import Readers
from lt_offload.profiling.meters import Meter
from lt_offload.profiling.step.allowed import runnable
from lt_offload.profiling.step.capture import Capture
from lt_offload.profiling.step.survey import Join, LossWithBlock, StepRecorder, Surveyed
from lt_offload.schema.profile import OptionProfile


class WatchedStep:
    """One step of a model.

    Args:
        model: that is trained.
        structure: what may be its blocks.
        device: where they run.
        meter: tells what a run costs.
        parts: of the batch, which go through each block in turn.
        loss: computes the last block together with the model's loss; None: the model does.
        code: returns what runs a block.
        say: is told what is being measured.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        device: torch.device,
        meter: Meter,
        *,
        parts: int = 1,
        loss: LossWithBlock | None = None,
        code: Callable[[nn.Module], Forward] = called,
        say: Progress,
    ) -> None:
        self.model, self.structure, self.device, self.parts = model, structure, device, parts
        self.batch: Any = None
        self._meter, self._loss, self._code, self._say = meter, loss, code, say
        self._readers = Readers(structure)
        self._watching: StepRecorder | None = None
        self._surveyed: Surveyed | None = None
        self.order: dict[int, int] = {}
        """The blocks of the profile, by the indices that they had in ``structure``."""
        self.forwards: list[list[int]] = []
        """The calls of each forward, as positions among all calls of blocks."""

    @contextmanager
    def watching(self, batch: Any, join: Join) -> Iterator[None]:
        """Enclose the forward of the step on ``batch``, which is on the device; ``join`` runs each block.

        Raises:
            ConfigError: if the batch has fewer samples than parts.
        """
        check_samples(batch, self.parts)
        self.batch, device = batch, self.device
        if device.type == "cuda":
            with current(device):
                warm_up(device)  # or the first block would be charged for the libraries' workspaces
        recorder = self._watching = StepRecorder(
            self.model,
            self.structure,
            device,
            partial(_stage, device),
            self._meter,
            self._readers.paused,
            join,
            self.parts,
            self._loss,
            self._code,
        )
        with runnable(self.structure), self._readers, recorder.watching(), self._in_memory():
            yield

    def returned(self, result: Any) -> Structure | None:
        """Note the step's result, and refuse a step that could not be trained exactly; see the recorder's.

        Returns what else may be the model's blocks, if the step has called none of the layers.
        """
        self._recorder.returned(result)
        return self._recorder.elsewhere

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Enclose the backward of the step."""
        with self._recorder.in_backward(), self._in_memory():
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

    def let_go(self) -> None:
        """Let go of the arguments of blocks: nothing of the step is measured any more."""
        self.batch = self._surveyed = None
        if self._watching is not None:
            self._watching.let_go()

    @property
    def _recorder(self) -> StepRecorder:
        assert self._watching is not None
        return self._watching

    def reached(self) -> Surveyed:
        """Return the survey of the step; to be called first when the backward has come to the first block.

        Raises:
            ModelError, UnsupportedError: if the model cannot be trained exactly.
        """
        if self._surveyed is None:
            self._surveyed = surveyed = self._recorder.reached()
            self._check_forwards(self.parts)
            self.structure, self.order, self.forwards = surveyed.structure, surveyed.order, surveyed.forwards
        return self._surveyed

    def costs(self, parts: int, *, unfrozen: bool = False) -> Measured:
        """Measure the blocks, with a batch in so many ``parts``; ``unfrozen``: more weights train now than in the step.

        Raises:
            UnsupportedError: if a block cannot take the batch in parts.
            OverBudget: if a GPU has no memory for one block of the batch.
        """
        surveyed, device, say = self.reached(), self.device, self._say
        self._check_forwards(parts)
        structure, readers = surveyed.structure, self._readers.of(surveyed.structure)
        again = [id(call) in surveyed.unrecorded for call in surveyed.capture.calls]
        with ExitStack() as stack:
            stack.enter_context(self._in_memory())
            stack.enter_context(runnable(structure))
            if device.type == "cuda":
                warm_up(device)
            calls = {id(call): call for call in (*surveyed.capture.calls, *(call for _, call in surveyed.others))}
            # Measuring runs each block several times: buffers and counters would have moved when training goes on.
            for call in calls.values():
                stack.enter_context(_unnoticed(call.module))
            captured = replace(self._with_others(surveyed), calls=self._calls(surveyed, parts, unfrozen=unfrozen))
            with_loss = costs_with_loss(captured, device, self._meter, say)
            apart = [call for call in captured.calls if not isinstance(call.module, HeadLoss)]
            alone = replace(captured, calls=tuple(apart), once=captured.once[: len(apart)])
            costs = block_costs(alone, device, self._meter, say)
            costs = [_run_again(cost) if runs else cost for cost, runs in zip(costs, again, strict=False)]
            if len(costs) < len(captured.calls):  # the last block is computed with the loss, in no other way
                costs.append(replace(with_loss[0], options=()))
            for module, call in zip((block.module for block in structure.blocks), captured.calls, strict=True):
                if call.compiled and self._code is called:  # else the step itself has run it uncompiled
                    with _stage(device, module), _unnoticed(module), silenced(module), readers.run_uncompiled(module):
                        replace(call, module=module).run(call.inputs)
            if device.type == "cuda":
                readers.measure_on(device, self._meter, say)
        return Measured(
            structure=structure, captured=captured, costs=costs, with_loss=with_loss, readers=readers, parts=parts
        )

    def _check_forwards(self, parts: int) -> None:
        if parts > 1 and self.reached().capture.deferred:
            raise limits.MICRO_BATCHES.error("a step calls the model again before the backward of an earlier call")

    def _calls(self, surveyed: Surveyed, parts: int, *, unfrozen: bool) -> tuple[Call, ...]:
        """Return the calls of blocks that take the batch in so many ``parts``; ``unfrozen``: with more gradients.

        Raises:
            UnsupportedError: if a block cannot.
        """
        structure, captured = surveyed.structure, surveyed.capture
        known: dict[object, Call] = {}
        calls: list[Call] = []
        trains = False
        for block, call, cutter in zip(structure.blocks, captured.calls, cutters(structure, parts), strict=True):
            key = id(call), cutter is None, trains
            if key not in known:
                if parts != self.parts:  # what it has given as a whole is not what its parts give
                    call = replace(call, cutter=cutter, given=[], rehearsed=[])
                own = any(parameter.requires_grad for parameter in block.module.parameters())
                # Behind a block that trains only now, inputs have gradients that the step has not shown.
                if unfrozen:
                    needs_grad = tuple(need or trains for need in call.needs_grad)
                    call = replace(call, needs_grad=needs_grad, has_backward=own or any(needs_grad))
                    trains = trains or own
                known[key] = call
                if cutter is not None and parts != self.parts:
                    with _stage(self.device, block.module), silenced(block.module), within(call.contexts):
                        self._recorder.boundary.check_samples(block, call, call.around(uncompiled(block.module)))
            calls.append(known[key])
        return tuple(calls)

    def _with_others(self, surveyed: Surveyed) -> Capture:
        """Return the capture, with the costs of modules that were called as blocks and are none.

        They ran as blocks, so that what they save was on the host; from now on they are part of the model's own code.
        """
        captured = surveyed.capture
        seams, between = list(captured.seams), captured.between
        for at, call in surveyed.others:
            with _stage(self.device, call.module), call.as_called(), silenced(call.module):
                keep = measure_block(call, self._meter, once=True).options[0]
            trained = [p for p in call.module.parameters() if p.requires_grad]
            most = keep.saved_bytes + keep.backward_peak_bytes + max((p.nbytes for p in trained), default=0)
            seams[at] = replace(
                seams[at],
                forward=max(seams[at].forward, keep.saved_bytes + keep.forward_peak_bytes),
                backward=max(seams[at].backward, most),
                rest=[*seams[at].rest, *trained],
            )
            between += keep.saved_bytes
        return replace(captured, seams=tuple(seams), between=between)


def _run_again(cost: BlockCost) -> BlockCost:
    """Return the cost of a block whose first backward runs its forward again, whatever is planned for it."""

    def raised(option: OptionProfile) -> OptionProfile:
        return at_least(option, option.forward_peak_bytes, ())

    return replace(cost, options=tuple(map(raised, cost.options)))


def _stage(device: torch.device, module: nn.Module) -> Any:
    return staged(tensors_of(module), device)


@contextmanager
def _unnoticed(module: nn.Module) -> Iterator[None]:
    """Enclose runs of a block that leave no trace in it."""
    with Effects(module).first_run() as before:
        yield
    before.undo()
