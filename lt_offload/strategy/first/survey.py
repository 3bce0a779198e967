"""The first step of a run under a Trainer, which trains and is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload.errors import PlanError
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.groups import move_rest
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.training.survey import Survey
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.execute.user_code.step_hooks import StepHooks
from lt_offload.model.location import located
from lt_offload.profiling.machine import measure_machine
from lt_offload.profiling.step.first import FirstStep
from lt_offload.schema.files import from_json
from lt_offload.schema.plan import PLAN_SCHEMA, Plan
from lt_offload.strategy import replay

if TYPE_CHECKING:
    from pathlib import Path

    from lt_offload.model.blocks import Structure
    from lt_offload.plan import Settings
    from lt_offload.schema.profile import Profile
    from lt_offload.strategy.replay import Before


_MOST_KEPT = 1 << 30
"""Bytes of activations that wait on the host at most, where blocks may run again: to lock more takes seconds."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The state that an engine leaves for the engine of the next plan."""

    window: CarriedWindow
    memory: int
    """Bytes of the device."""
    plan: Plan
    change: str
    """The reason for another plan."""


@contextmanager
def following(optimizer: Optimizer, begin: Callable[[], None]) -> Iterator[None]:
    """Let ``begin`` be called within the context, when the closure of a step of ``optimizer`` has returned."""
    hooks = StepHooks(optimizer, begin)
    try:
        yield
    finally:
        hooks.remove()


def order_of_sums(
    settings: Settings,
    micro_batches: int | Literal["auto"],
    path: str | Path | None,
    before: Before,
    plan: Plan | None,
) -> tuple[int, int | None]:
    """Return the order of sums in a step without a plan: that of the run's plan, as far as it is known.

    That is: the parts of the batch, which go through each block in turn, and the tokens that the output projection and
    the loss take at a time, 0: as many as suit; None: the model's own loss takes all of them.

    Args:
        settings: of plans.
        micro_batches: parts that are wanted; where their number is yet to be chosen, the step has one.
        path: of a saved plan that is to be used.
        before: the run that this one continues.
        plan: of an earlier step of this one.
    """
    if path is not None:
        plan = Plan.load(path)
    elif plan is None and before.plan is not None:
        with suppress(PlanError):  # the run is planned again, and says why
            plan = from_json(Plan, before.plan, source="the checkpoint's plan", schema=PLAN_SCHEMA)
    parts, chunk = plan.parts if plan is not None else before.micro_batches or 1, 0 if settings.chunked_loss else None
    if plan is not None and plan.chunk_tokens:
        chunk = plan.chunk_tokens
    return parts if micro_batches == "auto" else micro_batches, chunk


def one_list(structure: Structure) -> bool:
    """Return whether the model has no other candidate for its blocks."""
    return structure.other is None or structure.other() is None


class FirstIteration:
    """A training step without a plan, which is profiled.

    Args:
        root_device: the device of the blocks.
        settings: of plans.
        module: the trained model.
        structure: the candidates for the model's blocks.
        optimizer: its optimizer.
        known: an earlier profile, for the machine and the cost of updates.
        plan: is called when the backward comes to the first block; installs the plan's engine and returns its passes.
        order: of sums, as :func:`order_of_sums` returns it.
        open_device: opens the device with the budget that plans will have, for so many threads of updates.
        say: is told what is being measured.
    """

    def __init__(
        self,
        root_device: torch.device,
        settings: Settings,
        module: nn.Module,
        structure: Structure,
        optimizer: Optimizer,
        known: Profile | None,
        plan: Callable[[FirstIteration], Passes],
        *,
        order: tuple[int, int | None],
        open_device: Callable[[int], Device],
        say: Callable[[str], None],
    ) -> None:
        self._module, self._root_device = module, root_device
        machine = measure_machine(module, optimizer, root_device, say=say, **replay.as_measured(known, optimizer))
        parts, chunk = order
        self.step = FirstStep(
            module,
            structure,
            optimizer,
            root_device,
            machine,
            parts=parts,
            loss=None if chunk is None else LossInBlock.in_chunks(structure, chunk),
            say=say,
        )
        move_rest(module, structure, root_device)
        self.device = open_device(machine.updates.host_threads)
        room = min(_MOST_KEPT, self.step.host_room(settings.host_budget(machine.hardware)))
        self.plan = partial(plan, self)
        self.survey = Survey(structure, self.device, self.plan, room)
        self._located = ExitStack()
        self._located.enter_context(located(module, root_device))
        self._accounting = ExitStack()
        """Account of the memory that the step takes, not held against a budget as there is no plan."""
        self._structure = structure
        self.elsewhere: Structure | None = None
        """Another candidate for the model's blocks, if the step has called none of the layers."""
        self.over = False
        """True once the forward has ended."""
        self.watch = ExitStack()
        """A context that holds the budget between iterations, too."""
        self.watch.enter_context(self.device.between())

    @contextmanager
    def forward(self, batch: Any) -> Iterator[Callable[[Any], None]]:
        """Enclose the user's step; yields a function that takes its result."""
        self.device.enforce(False)
        self._accounting.enter_context(self.device.accounting())
        with self.survey.noting(), self.step.watching(batch, self.survey.forward):
            yield self._returned

    def _returned(self, result: Any) -> None:
        self.over = True
        self.elsewhere = self.step.returned(result)
        self.survey.unplanned = self.elsewhere is not None
        if self.elsewhere is not None:  # backward and update are plain PyTorch's, with all weights where it has them
            staying = (*self._structure.rest, *self._structure.tensors)
            self._structure = replace(self._structure, tensors=(), rest=staying)
            move_rest(self._module, self._structure, self._root_device)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Enclose the backward."""
        with self.step.in_backward():
            yield

    def measured(self, iteration: int, parts: int, optimizer: Optimizer | None = None) -> Profile:
        """Return the profile of the step, whose backward has come to the first block.

        Args:
            iteration: of the training.
            parts: in which the plan is to take the batch.
            optimizer: that the plan is for, with all weights that train now; None: that of the step.
        """
        self._accounting.close()
        return replace(self.step.profile(parts, optimizer), iterations=(iteration,))

    def leave(self) -> Survey:
        """Let an engine take over the device and the model; return the record of the step."""
        self.step.let_go()
        self._located.close()
        self.device.enforce(True)
        return self.survey

    def planned(self, passes: Passes) -> None:
        """Hand the step over to a plan's engine; called within that engine's iteration."""
        self.survey.planned(self.step.order, self.step.forwards, passes)

    def close(self) -> None:
        """Give the device back if no plan has taken it over."""
        self._accounting.close()
        self.watch.close()
        self._located.close()
        self.step.let_go()
        self.survey.close()
        move_rest(self._module, self._structure, torch.device("cpu"))
        self.device.close()
