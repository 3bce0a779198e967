"""Loops that users write themselves, on the device of --device: plain PyTorch's, and the same within `offloaded`.

A *loop* gets what it trains, as a user's code would have it, and returns what it has seen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lt_offload
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.gpu.target import ROOM, Target
from tests.gpu.users.runs import equal_updates
from tests.support import models
from tests.support.engines import Result, differences, equal
from tests.support.profiles.budgets import least, named_by

LOOPS = [
    pytest.mark.only("cuda", "cpu", "fake"),
    pytest.mark.usefixtures("deterministic", "empty_device"),
    pytest.mark.no_cover,
]
"""Marks of every module here: see those of tests/gpu/users."""

MODEL = {"layers": 6} | models.WIDE
"""25 MB of weights on a GPU."""

WAYS = ("tight", "resident")
in_both_ways = pytest.mark.parametrize("way", WAYS)

TIGHT = 0.4
"""Of the way from the smallest budget to the one in which everything stays."""


@dataclass(kw_only=True)
class Here:
    """What a loop has: model, optimizer and device, and the engine if there is one."""

    model: nn.Module
    optimizer: Optimizer
    batches: list[dict[str, torch.Tensor]]
    device: torch.device
    engine: Any = None
    seen: dict[str, Any] = field(default_factory=dict)
    """What a loop wants to be compared, too."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip_norm(self, norm: float) -> torch.Tensor:
        if self.engine is None:
            return nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        clipped: torch.Tensor = self.engine.clip_grad_norm_(norm)
        return clipped


Loop = Callable[[Here], list[torch.Tensor]]


def plain_steps(here: Here) -> list[torch.Tensor]:
    """The loop of the README."""
    losses = []
    for batch in here.batches:
        loss = here.model(**batch).loss
        loss.backward()
        here.step()
        losses.append(loss.detach().clone())
    return losses


@dataclass(frozen=True, kw_only=True)
class Bench:
    target: Target
    plans: dict[Any, Any]
    """Those that were made, by what was asked."""

    @property
    def device(self) -> torch.device:
        return self.target.torch_device

    def fresh(self, on_device: bool = False, checkpointed: bool = False, **options: Any) -> tuple[nn.Module, Optimizer]:
        """Return a model and its optimizer; ``checkpointed``: with transformers' activation checkpointing."""
        made = models.build(**MODEL | options)
        if checkpointed:
            enable = "activation_checkpointing_enable"  # as newer transformers call it
            getattr(made, enable if hasattr(made, enable) else "gradient_checkpointing_enable")()
        if on_device:
            made = made.to(self.device)
        trained = [p for p in made.parameters() if p.requires_grad]
        return made, torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1, fused=True)

    def batches(self, count: int = 4, on_device: bool = True) -> list[dict[str, torch.Tensor]]:
        made = [models.batch(nn.Linear(1, 1), batch_size=4, sequence_length=12, seed=i) for i in range(count)]
        return [{k: v.to(self.device) for k, v in batch.items()} for batch in made] if on_device else made

    def profile(self, **options: Any) -> Profile:
        """Measure the model, once for each."""
        key = repr(sorted(options.items()))
        if key not in self.plans:
            model, optimizer = self.fresh(**options)
            self.plans[key] = lt_offload.profile(model, self.batches(1)[0], optimizer=optimizer, device=self.device)
        found: Profile = self.plans[key]
        return found

    def plan(self, way: str, switches: dict[str, Any] | None = None, **options: Any) -> Plan:
        """Return a plan that has to copy, or in which everything stays; for one question the same."""
        switches = {"host_update": equal_updates(self.device), "solver_time_limit": 2.0} | (switches or {})
        key = repr((way, sorted(switches.items()), sorted(options.items())))
        if key in self.plans:
            made: Plan = self.plans[key]
            return made
        profile = self.profile(**options)
        if way == "resident":
            made = self._resident(profile, switches)
        else:
            smallest = least(profile, **switches)
            largest = self._resident(profile, switches).predicted.device_peak_bytes
            made = lt_offload.solve(profile, memory=int(smallest + TIGHT * (largest - smallest)), **switches)
        travels = any(op.lane in ("h2d", "d2h") for op in made.ops)
        assert travels == (way == "tight"), made.explain()
        self.plans[key] = made
        return made

    def _resident(self, profile: Profile, switches: dict[str, Any]) -> Plan:
        return lt_offload.solve(profile, memory=ROOM, **switches | {"host_update": False, "planner": "resident"})

    @contextmanager
    def within(self, way: str, here: Here, accumulate: int = 1, beside: int = 0, **options: Any) -> Iterator[Here]:
        """Run what is within by a plan, in a budget that has so many bytes ``beside`` for tensors of the loop's own."""
        delayed = options.pop("delayed", False)
        switches: dict[str, Any] = {"accumulate": accumulate} | ({"delayed": True} if delayed else {})
        plan = self.plan(way, switches, **options)
        plan = replace(plan, budget_bytes=plan.budget_bytes + beside)
        with lt_offload.offloaded(
            here.model,
            here.optimizer,
            here.batches[0],
            plan=plan,
            accelerator=self.target.accelerator,
            accumulate=accumulate,
        ) as engine:
            yield replace(here, engine=engine)

    def plainly(self, loop: Loop, **options: Any) -> tuple[Result, Here]:
        """Run ``loop`` without the package, as everybody does: everything on the device."""
        model, optimizer = self.fresh(on_device=True, **options)
        here = Here(model=model, optimizer=optimizer, batches=self.batches(), device=self.device)
        torch.manual_seed(1)
        losses = [loss.cpu() for loss in loop(here)]
        model.to("cpu")  # or it would be in the way of what is compared with it
        for state in optimizer.state.values():
            state |= {name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)}
        here.seen = on_host(here.seen)
        return Result(losses, model, optimizer), here

    def ours(
        self,
        way: str,
        loop: Loop,
        before: bool = False,
        accumulate: int = 1,
        delayed: bool = False,
        beside: int = 0,
        **options: Any,
    ) -> tuple[Result, Here]:
        """Run ``loop`` within a plan; ``before``: the model is on the device before."""
        model, optimizer = self.fresh(on_device=before, **options)
        here = Here(model=model, optimizer=optimizer, batches=self.batches(), device=self.device)
        with self.within(way, here, accumulate, beside, delayed=delayed, **options) as here:
            torch.manual_seed(1)
            losses = loop(here)
        return Result(losses, model, optimizer), here

    def compare(self, way: str, loop: Loop, **options: Any) -> list[str]:
        """Name what differs between ``loop`` with and without the package."""
        ours_only = ("before", "accumulate", "delayed", "beside")
        made = {name: value for name, value in options.items() if name not in ours_only}
        expected, plainly = self.plainly(loop, **made)
        gc.collect()
        found, ours = self.ours(way, loop, **options)
        assert len(expected.losses) > 0
        return differences(expected, found) + [
            f"seen {name}" for name, value in plainly.seen.items() if not same(value, ours.seen[name])
        ]

    def smallest(self, here: Here, **switches: Any) -> int:
        """Return what the error about too little memory says that would do."""
        switches |= {"memory": 20_000, "accelerator": self.target.accelerator}

        def begin() -> None:
            with lt_offload.offloaded(here.model, here.optimizer, here.batches[0], **switches):
                pass

        smallest = named_by(begin)
        gc.collect()
        return smallest


def on_host(seen: Any) -> Any:
    """Bring what a loop has seen to the host."""
    if isinstance(seen, torch.Tensor):
        return seen.cpu()
    if isinstance(seen, dict):
        return {key: on_host(value) for key, value in seen.items()}
    return [on_host(value) for value in seen] if isinstance(seen, (list, tuple)) else seen


def same(one: Any, other: Any) -> bool:
    """Whether two things that loops have seen are equal, wherever their tensors are."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
