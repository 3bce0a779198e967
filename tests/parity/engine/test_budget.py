"""The budget in every iteration and between iterations, on the emulated device: what passes it raises."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

import lt_offload
from lt_offload.errors import OverBudget
from tests.support import models
from tests.support.engines import make_optimizer
from tests.support.profiles.budgets import least
from tests.support.trainers import Module, trainer

MEMORY = 600_000
MUCH = 8_000_000
LATE = 3
"""The first step that takes too much."""


class Greedy(Module):
    """Its training step takes much memory from step ``LATE`` on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step >= LATE:
            torch.zeros(MUCH, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


class Keeps(Callback):
    """Makes much of what the step returned, from step ``LATE`` on."""

    def __init__(self, hook: str) -> None:
        self.steps = 0

        def grow(trainer: Any, module: Any, outputs: Any = None, *args: Any, **kwargs: Any) -> None:
            self.steps = trainer.global_step
            if trainer.global_step >= LATE:
                module.losses[-1].expand(MUCH // 4).clone()

        setattr(self, hook, grow)


class Average(Callback):
    """An exponential moving average of the weights, and copies of them, on the host."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, parameter in module.named_parameters():
            value = parameter.detach()
            self.weights.setdefault(name, value.clone()).mul_(0.5).add_(value, alpha=0.5)
        self.kept.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
        self.kept.append(copy.deepcopy(self.weights))
        self.kept.append(torch.zeros(MUCH, dtype=torch.uint8))


def fit(module: Any, *callbacks: Callback) -> None:
    trainer(lt_offload.OffmateStrategy(memory=MEMORY), callbacks=list(callbacks)).fit(module)


def test_a_training_step_that_takes_more_later_on() -> None:
    module = Greedy(layers=4)
    with pytest.raises(OverBudget, match="8000000 bytes"):
        fit(module)
    assert len(module.losses) == LATE


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start", "on_train_epoch_end"])
def test_a_callback_that_takes_more_later_on(hook: str) -> None:
    callback = Keeps(hook)
    with pytest.raises(OverBudget, match="8000000 bytes"):
        fit(Module(layers=4), callback)
    assert callback.steps == LATE


def test_copies_on_the_host_are_not_device_memory() -> None:
    callback = Average()
    module = Module(layers=4)
    fit(module, callback)
    assert len(callback.kept) == 3 * 6
    held = sum(tensor.nbytes for tensor in callback.weights.values())
    assert 6 * held > MEMORY


def loop(late: Callable[[Any, torch.Tensor], None], *, inside: bool) -> int:
    """Train in a plain loop; ``late`` is called from step ``LATE`` on, before the backward or after the update."""
    model = models.build("llama", layers=4)
    optimizer = make_optimizer(model, "adamw-fused")
    batch = models.batch(model)
    step = 0
    with lt_offload.offloaded(model, optimizer, batch, memory=MEMORY, accelerator="cpu"):
        for step in range(2 * LATE):
            loss = model(**batch).loss
            if inside and step >= LATE:
                late(model, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not inside and step >= LATE:
                late(model, loss)
    return step


@pytest.mark.parametrize("inside", [True, False])
def test_a_plain_loop_that_takes_more_later_on(inside: bool) -> None:
    steps = []

    def grow(model: Any, loss: torch.Tensor) -> None:
        steps.append(1)
        loss.detach().expand(MUCH // 4).clone()

    with pytest.raises(OverBudget, match="8000000 bytes"):
        loop(grow, inside=inside)
    assert len(steps) == 1


def test_a_plain_loop_that_makes_much_from_nothing() -> None:
    """In an iteration it counts, beside one it is the host's: the next batch, say."""

    def grow(model: Any, loss: torch.Tensor) -> None:
        torch.zeros(MUCH, dtype=torch.uint8)

    with pytest.raises(OverBudget, match="8000000 bytes"):
        loop(grow, inside=True)
    assert loop(grow, inside=False) == 2 * LATE - 1


def test_a_plain_loop_that_copies_weights_to_the_host() -> None:
    kept: list[Any] = []

    def clone(model: Any, loss: torch.Tensor) -> None:
        kept.extend({name: tensor.clone() for name, tensor in model.state_dict().items()} for _ in range(10))

    assert loop(clone, inside=False) == 2 * LATE - 1
    assert sum(t.nbytes for state in kept for t in state.values()) > MEMORY


# -- host memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "message"), [(0.8, "host_memory=.*or more"), (0.3, r"setting host_memory\), but")])
def test_host_memory_is_held(share: float, message: str) -> None:
    """A plan that asks for less RAM than it takes is stopped: when it takes it, or when the states have come."""
    model = models.build("llama", layers=4)
    optimizer = make_optimizer(model, "adamw-fused")
    batch = models.batch(model)
    profile = lt_offload.profile(model, batch, optimizer=optimizer)
    plan = lt_offload.solve(profile, memory=300_000)
    assert set(plan.update_places) >= {"host"}
    needed = plan.predicted.host_peak_bytes
    losses = []
    own = plan.process_bytes
    for budget in (needed, own + int(share * (needed - own))):
        model = models.build("llama", layers=4)
        optimizer = make_optimizer(model, "adamw-fused")
        limited = replace(plan, host_budget_bytes=budget)
        context = pytest.raises(OverBudget, match=message) if budget < needed else nullcontext()
        with context, lt_offload.offloaded(model, optimizer, batch, plan=limited, accelerator="cpu"):
            for _ in range(2):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    assert len(losses) == 2


CHILD = """
import gc, json, re, sys
import torch, lt_offload
from tests.support import models
from tests.support.machine import this_machine
from tests.support.engines import make_optimizer

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def build(sizes):
    model = models.build("llama", **sizes)
    models._built.clear()
    return model, make_optimizer(model, "adamw-fused"), models.batch(model, sequence_length=48)

def planned(memory, **sizes):  # what is left free in the heap afterwards has no account
    model, optimizer, batch = build(sizes)
    profile = lt_offload.profile(model, batch, optimizer=optimizer, hardware=this_machine())
    return lt_offload.solve(profile, memory=memory, host_update=memory < 10**9)

def train(plan, **sizes):
    model, optimizer, batch = build(sizes)
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    with lt_offload.offloaded(model, optimizer, batch, plan=plan, accelerator="cpu"):
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

train(planned(400_000))  # loads libraries and compiles what is compiled once
sizes = dict(layers=8, hidden_size=256, intermediate_size=768, vocab_size=2048)
for memory in map(int, sys.argv[1:]):
    plan = planned(memory, **sizes)
    gc.collect()
    before = status("VmRSS")
    train(plan, **sizes)
    print(json.dumps({
        "grown": status("VmHWM") - before,
        "process": plan.process_bytes,
        "before": before,
        "host": plan.predicted.host_peak_bytes,
        "device": plan.predicted.device_peak_bytes,
        "places": sorted(set(plan.update_places)),
    }))
"""


class SumOfSquares(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().sum(-1)


class CopiedInput(nn.Module):
    """Gives its head, whose backward takes the most, a copy of what the last layer has returned, as TRL's losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = SumOfSquares(64, 400, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, :-1].reshape(-1, 64)).mean()


def test_the_smallest_budget_is_enough_where_the_head_gets_a_copy() -> None:
    torch.manual_seed(0)
    model = CopiedInput()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"ids": torch.randint(50, (4, 33))}
    memory = least(lt_offload.profile(model, batch, optimizer=optimizer))
    with lt_offload.offloaded(model, optimizer, batch, memory=memory, accelerator="cpu"):
        for _ in range(2):
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_takes_what_the_plan_says() -> None:
    """The emulated device is RAM, too, so that the process grows by both accounts.

    Two megabytes are for what no account has: code and Python objects of the larger model, threads' stacks, pages that
    are only partly in use (a storage of at least 64 kB has its own pages here, of which the last is used by half, for
    some 500 storages). Smaller storages come from the C library's heap, which keeps what is freed: without the
    threshold it would keep larger ones as well.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, "40_000_000", "2_000_000_000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print(rows)
    for found, places in zip(rows, ({"host"}, {"device", "paged"}), strict=True):
        assert places.intersection(found["places"])
        # Python and libraries are in it as they were when the machine was measured.
        assert 0.8 * found["before"] <= found["process"] <= found["before"]
        accounted = found["host"] - found["process"] + found["device"]
        assert found["grown"] <= accounted + 2_000_000
        assert found["grown"] >= 0.85 * accounted
