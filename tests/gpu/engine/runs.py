"""Runs under a Trainer with a plan that uses every option, so that weights travel whatever the budget is."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from lt_offload import OffmateStrategy
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.gpu.target import ROOM, Target
from tests.support import trainers

SOMEWHERE = [
    pytest.mark.only("cuda", "cpu"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*settings to control TF32.*"),
]


class Travelling(trainers.Forced):
    """Updates on the device alone: those of the host have other last bits than a GPU's."""

    places = ("device", "paged")

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        return replace(super()._make_plan(profile, settings), budget_bytes=ROOM)


def travelling() -> OffmateStrategy:
    return Travelling(memory=ROOM)


def trainer(target: Target, strategy: Any, **settings: Any) -> Any:
    return trainers.trainer(strategy, accelerator=target.accelerator, devices=1, deterministic=True, **settings)


def fit(target: Target, strategy: Any, module: Any, **settings: Any) -> trainers.Run:
    gc.collect()
    return trainers.fit(strategy, module, made=trainer(target, strategy, **settings))


def on(device: torch.device, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
