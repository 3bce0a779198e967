"""Runs under a Trainer on the device of --device: stock Lightning's, and ours within budgets that force copies or none.

A *scene* is what a user does with a strategy: it makes model, callbacks and trainer anew and returns what is compared.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload import OffmateStrategy
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.gpu.target import ROOM, Target
from tests.support import models, trainers
from tests.support.profiles.budgets import named_by
from tests.support.trainers import Run

MODEL = {"layers": 8} | models.WIDE
"""30 MB of weights on a GPU, so that budgets between are of some use."""

WAYS = ("tight", "resident")
in_both_ways = pytest.mark.parametrize("way", WAYS)

USERS = [
    pytest.mark.only("cuda", "cpu", "fake"),
    pytest.mark.usefixtures("deterministic", "empty_device"),
    pytest.mark.no_cover,
    pytest.mark.filterwarnings("ignore:.*settings to control TF32.*"),
]
"""Marks of every module here. The model of CUDA has no kernels, so no Trainer runs on it.

The lines that speak to CUDA are all executed by other tests, and to watch lines takes a quarter of the time.
"""

Scene = Callable[[Any], Any]

_TIGHT = 0.5


def module(seed: int = 7, **options: Any) -> Any:
    """Return a LightningModule, seeded; ``options`` go to :func:`tests.support.models.build`."""
    return trainers.seeded_module(seed, **MODEL | options)


class Noted(OffmateStrategy):
    """Keeps its first plan."""

    first: Plan | None = None

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        self.first = super()._make_plan(profile, settings)
        return self.first


@functools.cache
def equal_updates(device: torch.device) -> bool:
    """Whether AdamW gives the same bits on the host as on ``device``: only then may a plan update on the host here."""
    found = []
    for place in ("cpu", device):
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4099, generator=generator).to(place))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
        for _ in range(3):
            weight.grad = torch.randn(4099, generator=generator).to(place)
            optimizer.step()
        found.append(weight.detach().cpu())
    return torch.equal(*found)


@dataclass(frozen=True)
class Bench:
    """Where runs take place."""

    target: Target
    profiles: list[Profile]
    """The last one is of the last run."""

    @property
    def device(self) -> torch.device:
        return self.target.torch_device

    def fit(self, strategy: Any, module_: Any = None, **settings: Any) -> Run:
        """Train ``module_`` with a Trainer that has ``strategy``."""
        run = trainers.fit(strategy, module() if module_ is None else module_, **self.settings | settings)
        for found in (run.module.losses, run.module.validation):  # or they would be in the next run's way
            found[:] = [value.cpu() for value in found]
        return run

    def trainer(self, strategy: Any, **settings: Any) -> Any:
        return trainers.trainer(strategy, **self.settings | settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {"accelerator": self.target.accelerator, "devices": 1, "deterministic": True}

    def strategy(self, way: str, probe: Scene, *, share: float = _TIGHT, **options: Any) -> OffmateStrategy:
        """Return ours, with a budget for the run that ``probe`` begins; ``share``: see :meth:`tight`."""
        options = self.options | options
        if way == "resident":
            return OffmateStrategy(memory=ROOM, planner="resident", **options | {"host_update": False})
        return Noted(memory=self.tight(probe, share, **options), **options)

    @property
    def options(self) -> dict[str, Any]:
        return {"host_update": equal_updates(self.device), "solver_time_limit": 2.0}

    def tight(self, probe: Scene, share: float = _TIGHT, **options: Any) -> int:
        """Return a budget in which the run of ``probe`` has to copy.

        It is ``share`` of the way from the smallest one to that in which everything stays.
        """
        smallest = named_by(lambda: probe(OffmateStrategy(memory="20KB", **options)))
        gc.collect()  # the traceback of the error holds the run
        profile = self.profiles[-1]
        everything = lt_offload.solve(
            profile, memory=profile.hardware.device_bytes, planner="resident", host_update=False
        )
        largest = everything.predicted.device_peak_bytes
        assert smallest < largest
        return int(smallest + share * (largest - smallest))

    def compare(self, way: str, scene: Scene, probe: Scene | None = None, **options: Any) -> tuple[Any, Any]:
        """Return what ``scene`` gives with stock Lightning and with ours."""
        expected = scene("auto")
        gc.collect()
        strategy = self.strategy(way, probe or scene, **options)
        found = scene(strategy)
        check_way(way, strategy)
        return expected, found


def check_way(way: str, strategy: OffmateStrategy) -> None:
    """Say so if a plan is not what ``way`` is there for."""
    plan = strategy.first if isinstance(strategy, Noted) else strategy.plan
    assert plan is not None
    travels = any(op.lane in ("h2d", "d2h") for op in plan.ops)
    assert travels == (way == "tight"), plan.explain()


def saver(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a Trainer that keeps a file per step."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    kept = {"filename": "{step}", "save_top_k": -1, "every_n_train_steps": 1} | settings
    return {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, **kept)]}
