"""The first step of a run under a Trainer, which trains and is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.execute import installed
from lt_offload.execute.memory.groups import move_rest
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.training.survey import Survey
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.model.location import located
from lt_offload.profiling.machine import measure_machine
from lt_offload.profiling.step.first import FirstStep
from lt_offload.strategy import replay

if TYPE_CHECKING:
    from lt_offload.model.blocks import Structure
    from lt_offload.plan import Settings
    from lt_offload.schema.profile import Profile


_MOST_KEPT = 1 << 30
"""Bytes of activations that wait on the host at most, where blocks may run again: to lock more takes seconds."""
_OF_LOGIT = 16
"""Bytes that a model's own loss takes for a logit: logits, in fp32, too, their logarithms, and gradients of both."""


def early_loss(structure: Structure, tokens: int, budget: int, device: torch.device) -> LossInBlock | None:
    """Return what computes the last block and the loss in a step without a plan, where that has to save memory.

    None if the model's own loss of so many ``tokens`` may fit within ``budget`` bytes of a GPU. Plans compute the same
    numbers in a fraction of that, so that it says nothing about them.
    """
    weight = getattr(structure.blocks[-1].module, "weight", None)
    if device.type != "cuda" or not isinstance(weight, Tensor):
        return None
    fits = _OF_LOGIT * tokens * len(weight) + 2 * weight.nbytes < budget
    return None if fits else LossInBlock.early(structure, 0)


class FirstIteration:
    """A training step without a plan, which is profiled.

    ``known`` is an earlier profile, for the machine and the cost of updates. ``plan`` is called when the backward comes
    to the first block; it installs the plan's engine and returns its passes. ``loss`` computes the last block together
    with the loss; None: the model does.
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
        parts: int,
        loss: LossInBlock | None,
        budget: int,
        say: Callable[[str], None],
    ) -> None:
        self._module, self._root_device = module, root_device
        machine = measure_machine(module, optimizer, root_device, say=say, **replay.as_measured(known, optimizer))
        self.step = FirstStep(module, structure, optimizer, root_device, machine, parts=parts, loss=loss, say=say)
        move_rest(module, structure, root_device)
        self.device = installed.open_device(budget, str(root_device), host_threads=machine.updates.host_threads or None)
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

        ``parts``: in which the plan is to take the batch. ``optimizer``: the one that the plan is for, with all weights
        that train now; None: that of the step.
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
