"""Sums that go between machines beside the backward: complete before they leave, back before they are used, in order.

The other machine is made up, in this process: it has the same batches, so that every sum comes back twice as large.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_offload.errors import ProcessError
from lt_offload.execute.engine import Engine
from lt_offload.schema.plan import Plan
from tests.parity.several.cases import PAIRS, plan
from tests.parity.several.training import STEPS, Case, plainly
from tests.support.engines import Result, differences, make_optimizer, scheduler
from tests.support.hostile.device import HostileDevice


class Neighbours:
    """The processes of this machine: this one."""

    rank, size = 0, 1

    def gather(self, value: Any, place: str = "") -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def check(self) -> None:
        """Nobody has failed."""

    def share_file(self, make: Callable[[], int], by: int) -> int:
        return make()


class Mirror:
    """All processes: this one, and one of another machine that has the same batches; notes what is sent."""

    size = 2

    def __init__(self) -> None:
        self.machine = Neighbours()
        self.sent: list[int] = []
        self.threads: set[str] = set()
        self.broken = False
        self._chance = random.Random(3)

    def gather(self, value: Any, place: str = "") -> list[Any]:
        return [value, value]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.add_(tensor.clone())

    def add_up_rows(self, rows: Sequence[Sequence[Tensor]], *, op: int | None = None) -> None:
        assert op is not None, "all sums of these plans go beside the backward"
        self.sent.append(sum(row[0].nbytes for row in rows))
        self.threads.add(threading.current_thread().name)
        if self.broken:
            raise ProcessError("process 1 failed: gone")
        copies = [row[0].clone() for row in rows]
        time.sleep(self._chance.random() * 4e-3)
        for row, other in zip(rows, copies, strict=True):
            assert torch.equal(row[0], other), "it changes while it is sent"
            row[0].add_(other)


class Late(HostileDevice):
    """Copies take a while, each another one."""

    chance = random.Random(5)

    def copy(self, target: Tensor, source: Tensor) -> None:
        time.sleep(self.chance.random() * 2e-3)
        super().copy(target, source)


class Mirrored(Case):
    """All processes have the first one's batches."""

    def batch(self, step: int, rank: int, part: int) -> dict[str, Tensor]:
        return super().batch(step, 0, part)


def of_both(case: Case) -> Result:
    """Train plainly with each batch twice, as two processes would that have the same ones."""
    return plainly(Mirrored(**vars(case)), 2)


def engine_of(
    case: Case, plan: Plan, others: Mirror, mode: Any, *, follow: bool = True
) -> Iterator[tuple[Engine, torch.nn.Module, Any]]:
    model = case.build()
    optimizer = make_optimizer(model, case.optimizer)
    device = Late(plan.budget_bytes, mode=mode, check=True)
    engine = Engine(model, optimizer, plan, device, others=others)
    try:
        engine.install()
        if follow:
            engine.follow(optimizer)
        engine.clip_value = case.clip_value
        if case.accumulate > 1:
            engine.accumulate = case.accumulate
        yield engine, model, optimizer
    finally:
        engine.remove()
        device.close()


def trained(case: Case, plan: Plan, others: Mirror, mode: Any) -> Result:
    losses = []
    for engine, model, optimizer in engine_of(case, plan, others, mode):
        schedule = scheduler(optimizer)
        for step in range(STEPS):
            own = []
            for part in range(case.accumulate):
                loss = case.loss(model, case.batch(step, 0, part), 2)
                loss.backward()
                own.append(loss.detach().clone())
            losses += own * 2
            if case.clip_norm is not None:
                losses.append(engine.clip_grad_norm_(case.clip_norm))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return Result(losses, model, optimizer)


def enclosed(case: Case, plan: Plan, others: Mirror, mode: Any) -> Result:
    """Train as a Trainer does, which says when a step begins and ends: nobody looks at gradients before updates."""
    losses = []
    for engine, model, optimizer in engine_of(case, plan, others, mode, follow=False):
        schedule = scheduler(optimizer)
        for step in range(STEPS):
            own = []
            for part in range(case.accumulate):
                last = part == case.accumulate - 1
                with engine.iteration(last=last):
                    loss = case.loss(model, case.batch(step, 0, part), 2)
                    loss.backward()
                    own.append(loss.detach().clone())
                    if last:
                        optimizer.step()
            optimizer.zero_grad()
            losses += own * 2
            schedule.step()
    return Result(losses, model, optimizer)


def require_equal(name: str, mode: str, train: Callable[..., Result] = trained) -> None:
    """Train in a mode of the device, and compare with plain training."""
    case, budget, settings = PAIRS[name]
    found, others = plan(case, budget, settings, machines=2), Mirror()
    result = train(case, found, others, mode)
    assert differences(result, of_both(case)) == []
    # Once per update, in the order of the plan, whatever is complete first.
    assert others.sent == [op.bytes for op in found.ops if op.kind == "reduce"] * STEPS
    assert others.threads == ({"lt_offload network"} if mode == "thread" else {threading.current_thread().name})


def test_sums_are_complete_when_they_leave_and_back_when_they_are_used() -> None:
    require_equal("accumulated", "thread")


def test_updates_wait_for_what_comes_back() -> None:
    require_equal("tight", "thread", enclosed)


@pytest.mark.parametrize("name", ["in the middle", "accumulated", "clipped by value"])
def test_so_do_those_of_other_plans(name: str) -> None:
    require_equal(name, "thread", enclosed)


@pytest.mark.parametrize("name", ["tight", "in the middle", "clipped by norm", "clipped by value"])
def test_so_are_those_of_other_plans(name: str) -> None:
    require_equal(name, "thread")


@pytest.mark.slow  # other models are measured for them
@pytest.mark.parametrize("name", ["tied", "lora"])
def test_so_are_those_of_other_models(name: str) -> None:
    require_equal(name, "thread")


@pytest.mark.parametrize(("name", "mode"), [("accumulated", "lazy"), ("in the middle", "random")])
def test_they_go_at_the_end_where_tasks_run_in_the_calling_thread(name: str, mode: str) -> None:
    require_equal(name, mode)


def test_an_exchange_that_fails_ends_the_step() -> None:
    case, budget, settings = PAIRS["tight"]
    others = Mirror()
    for _, model, optimizer in engine_of(case, plan(case, budget, settings, machines=2), others, "thread"):
        others.broken = True
        with pytest.raises(ProcessError, match="process 1 failed: gone"):  # noqa: PT012  # wherever it is noticed
            case.loss(model, case.batch(0, 0, 0), 2).backward()
            optimizer.step()
            case.loss(model, case.batch(1, 0, 0), 2).backward()
