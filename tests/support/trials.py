"""Models that are trained twice, plainly and by plans for budgets: what most tests of kinds of models do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import lt_offload
from lt_offload import Plan, Profile
from tests.support.engines import Result, differences
from tests.support.profiles import budgets
from tests.support.user_nets import adamw, ordinary, seed


@dataclass(eq=False)
class Trial:
    """A model that is made anew for every run, with its batches and its optimizer."""

    make: Callable[[], nn.Module]
    batches: Callable[[], list[dict[str, Tensor]]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train()

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Result:
        batches = self.batches()
        seed()
        return Result(ordinary(model, optimizer, batches), model, optimizer)

    @cached_property
    def plain(self) -> Result:
        model = self.model()
        return self.run(model, self.optimizer(model))

    @cached_property
    def profile(self) -> Profile:
        model = self.model()
        return lt_offload.profile(model, self.batches()[0], optimizer=self.optimizer(model))

    def planned(self, budget: str) -> Plan:
        return budgets.planned(self.profile, budget)

    def offloaded(self, **settings: Any) -> Result:
        """Train in a loop of one's own within a session with ``settings``."""
        model = self.model()
        optimizer = self.optimizer(model)
        with lt_offload.offloaded(model, optimizer, self.batches()[0], accelerator="cpu", **settings):
            return self.run(model, optimizer)

    def differences(self, **settings: Any) -> list[str]:
        """Name what such a session changes."""
        return differences(self.plain, self.offloaded(**settings))

    def at(self, budget: str) -> list[str]:
        """Name what a plan for ``budget`` changes."""
        return self.differences(plan=self.planned(budget))
