"""The first step of a training, which counts: it is watched, its blocks are measured, and there is a profile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.errors import OverBudget
from lt_offload.machine.driver import context_bytes, current, use_expandable_segments, warm_up
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import Call
from lt_offload.model.compiled import uncompiled
from lt_offload.model.head import HeadLoss
from lt_offload.model.location import staged
from lt_offload.model.parts import check_samples, cutters
from lt_offload.model.quantized import tensors_of
from lt_offload.model.state.contexts import within
from lt_offload.model.state.effects import Effects
from lt_offload.model.state.hooks import silenced
from lt_offload.profiling.block_cost import BlockCost, measure_block
from lt_offload.profiling.host_reads import Readers
from lt_offload.profiling.machine import measure_machine
from lt_offload.profiling.measure import (
    Measured,
    Progress,
    assemble,
    at_least,
    block_costs,
    costs_with_loss,
    too_large,
)
from lt_offload.profiling.meters import Stopwatch
from lt_offload.profiling.optimizer import UpdateSizes
from lt_offload.profiling.step.allowed import runnable
from lt_offload.profiling.step.capture import Capture
from lt_offload.profiling.step.survey import Join, LossWithBlock, StepRecorder, Surveyed
from lt_offload.schema.profile import HardwareProfile, OptimizerProfile, OptionProfile, Profile


class FirstStep:
    """The first step of a model's training.

    Args:
        model: with its weights on the host.
        structure: what may be its blocks.
        optimizer: the one that will be used.
        device: where blocks run.
        hardware: the machine, if it has been measured before.
        updates: what updates by this optimizer cost, if that has been measured before.
        parts: of the batch, which go through each block in turn.
        loss: computes the last block together with the model's loss; None: the model does.
        say: is told what is being measured.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        optimizer: Optimizer,
        device: torch.device,
        *,
        hardware: HardwareProfile | None = None,
        updates: OptimizerProfile | None = None,
        parts: int = 1,
        loss: LossWithBlock | None = None,
        say: Progress,
    ) -> None:
        self.model, self.structure, self._optimizer, self._device, self._say = model, structure, optimizer, device, say
        if device.type == "cuda":
            use_expandable_segments(device)
        self._machine, self.updates, self._contention = measure_machine(
            model, optimizer, device, hardware, updates, say
        )
        self._meter = Stopwatch(device)
        self.parts, self._loss = parts, loss
        self._readers = Readers(structure)
        self._batch: Any = None
        self._watching: StepRecorder | None = None
        self._surveyed: Surveyed | None = None
        self.order: dict[int, int] = {}
        """The blocks of the profile, by the indices that they had in ``structure``."""
        self.forwards: list[list[int]] = []
        """The calls of each forward, as positions among all calls of blocks."""

    def host_room(self, budget: int) -> int:
        """Return the RAM that training leaves for activations, of ``budget`` bytes, wherever its states are."""
        sizes = UpdateSizes(self._optimizer, self._device, scratch_ratio=0.0)
        each = (p.nbytes + (p.nbytes + sizes.state(p) if p.requires_grad else 0) for p in self.model.parameters())
        return max(0, budget - self._machine.process_bytes - sum(each))

    @property
    def machine(self) -> HardwareProfile:
        """The machine."""
        return self._machine

    @contextmanager
    def watching(self, batch: Any, join: Join) -> Iterator[None]:
        """Enclose the forward of the step.

        Args:
            batch: on the device.
            join: runs each block.

        Raises:
            ConfigError: if the batch has fewer samples than parts.
        """
        check_samples(batch, self.parts)
        self._batch = batch
        if self._device.type == "cuda":
            with current(self._device):
                warm_up(self._device)
        stage = partial(_stage, self._device)
        recorder = self._watching = StepRecorder(
            self.model,
            self.structure,
            self._device,
            stage,
            self._meter,
            self._readers.paused,
            join,
            self.parts,
            self._loss,
        )
        with runnable(self.structure), self._readers, recorder.watching():
            self._say("the first step, which shows what to plan")
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise OverBudget(too_large(batch, self._device)) from error

    def returned(self, result: Any) -> Structure | None:
        """Take note of what the step has returned, and refuse what could not be trained exactly; see the recorder's.

        Returns what else may be the model's blocks, if the step has called none of the layers: it trains without a
        plan, and the next one shows what to plan.
        """
        self._recorder.returned(result)
        return self._recorder.elsewhere

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Enclose the backward of the step."""
        with self._recorder.in_backward():
            try:
                yield
            except torch.OutOfMemoryError as error:
                if self._batch is None:  # there is a plan, whose engine says what it needs
                    raise
                raise OverBudget(too_large(self._batch, self._device)) from error

    def let_go(self) -> None:
        """Let go of what blocks were called with: nothing of the step is measured any more."""
        self._batch = self._surveyed = None
        if self._watching is not None:
            self._watching.let_go()

    @property
    def _recorder(self) -> StepRecorder:
        assert self._watching is not None
        return self._watching

    def profile(self, parts: int, optimizer: Optimizer | None = None) -> Profile:
        """Measure the blocks and return the profile; to be called when the backward has come to the first block.

        Args:
            parts: of the batch, which are to go through each block in turn.
            optimizer: that is to be used, with all weights that train now; None: that of the step.

        Raises:
            ModelError, UnsupportedError: if the model cannot be trained exactly.
            OverBudget: if a GPU has no memory for one block of the batch.
        """
        with current(self._device), _random_kept(self._device), torch.enable_grad():
            if self._surveyed is None:
                self._surveyed = surveyed = self._recorder.reached()
                self.structure, self.order, self.forwards = surveyed.structure, surveyed.order, surveyed.forwards
            try:
                return self.measure(self._surveyed, parts, optimizer or self._optimizer)
            except torch.OutOfMemoryError as error:
                raise OverBudget(too_large(self._batch, self._device)) from error

    def measure(self, surveyed: Surveyed, parts: int, optimizer: Optimizer) -> Profile:
        """Return the profile of a step that has shown this, with a batch in so many ``parts``."""
        device, structure = self._device, surveyed.structure
        again = [id(call) in surveyed.unrecorded for call in surveyed.capture.calls]
        with ExitStack() as stack:
            if device.type == "cuda":
                warm_up(device)
            calls = {id(call): call for call in (*surveyed.capture.calls, *(call for _, call in surveyed.others))}
            for call in calls.values():
                stack.enter_context(_unnoticed(call.module))
            unfrozen = optimizer is not self._optimizer
            captured = replace(self._with_others(surveyed), calls=self._calls(surveyed, parts, unfrozen=unfrozen))
            with_loss = costs_with_loss(captured, device, self._meter, self._say, silenced)
            apart = [call for call in captured.calls if not isinstance(call.module, HeadLoss)]
            alone = replace(captured, calls=tuple(apart), once=captured.once[: len(apart)])
            costs = block_costs(alone, device, self._meter, self._say, silenced)
            costs = [_run_again(cost) if runs else cost for cost, runs in zip(costs, again, strict=False)]
            if len(costs) < len(captured.calls):  # the last block is computed with the loss, in no other way
                costs.append(replace(with_loss[0], options=()))
            readers = self._readers.of(structure)
            for module, call in zip((block.module for block in structure.blocks), captured.calls, strict=True):
                if call.compiled:
                    with _stage(device, module), _unnoticed(module), silenced(module), readers.run_uncompiled(module):
                        replace(call, module=module).run(call.inputs)
            if device.type == "cuda":
                readers.measure_on(device, self._meter, self._say)
        machine = self._machine
        if device.type == "cuda":  # by now all kernels are there
            machine = replace(machine, context_bytes=max(machine.context_bytes, context_bytes(device)))
        ratio = self.updates.scratch_ratio if device.type == "cuda" else 0.0
        measured = Measured(
            structure=structure, captured=captured, costs=costs, with_loss=with_loss, readers=readers, parts=parts
        )
        found = assemble(
            self.model,
            self._batch,
            measured,
            sizes=UpdateSizes(optimizer, device, scratch_ratio=ratio),
            updates=self.updates,
            hardware=machine,
            estimated=False,
        )
        return replace(found, contention=self._contention)

    def _calls(self, surveyed: Surveyed, parts: int, *, unfrozen: bool) -> tuple[Call, ...]:
        """Return the calls of blocks that take the batch in so many ``parts``.

        Args:
            surveyed: by the step.
            parts: of the batch.
            unfrozen: more weights train than in the step, so that more gradients come.

        Raises:
            UnsupportedError: if a block cannot.
        """
        structure, captured = surveyed.structure, surveyed.capture
        if parts > 1 and captured.deferred:
            raise limits.MICRO_BATCHES.error("a step calls the model again before the backward of an earlier call")
        known: dict[object, Call] = {}
        calls: list[Call] = []
        trains = False
        for block, call, cutter in zip(structure.blocks, captured.calls, cutters(structure, parts), strict=True):
            key = id(call), cutter is None, trains
            if key not in known:
                if parts != self.parts:  # what it has given as a whole is not what its parts give
                    call = replace(call, cutter=cutter, given=[], rehearsed=[])
                own = any(parameter.requires_grad for parameter in block.module.parameters())
                if unfrozen:
                    needs_grad = tuple(need or trains for need in call.needs_grad)
                    call = replace(call, needs_grad=needs_grad, has_backward=own or any(needs_grad))
                    trains = trains or own
                known[key] = call
                if cutter is not None:
                    with _stage(self._device, block.module), silenced(block.module), within(call.contexts):
                        self._recorder.boundary.check_samples(block, call, uncompiled(block.module))
            calls.append(known[key])
        return tuple(calls)

    def _with_others(self, surveyed: Surveyed) -> Capture:
        """Return what was captured, with the costs of modules that were called as blocks and are none.

        They ran as blocks, so that what they save was on the host; from now on they are part of the model's own code.
        """
        captured = surveyed.capture
        seams, between = list(captured.seams), captured.between
        for at, call in surveyed.others:
            with _stage(self._device, call.module), call.as_called(), silenced(call.module):
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


@contextmanager
def _random_kept(device: torch.device) -> Iterator[None]:
    """Leave all global generators as they are."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
