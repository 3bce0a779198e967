"""Sums that go to another machine beside the backward, from page-locked host memory, by a thread of their lane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lt_offload.execute.engine import Engine
from lt_offload.plan import Plan, solve
from tests.gpu.target import Target
from tests.parity.several.cases import PAIRS, profile
from tests.parity.several.training import STEPS, Case
from tests.parity.test_beside_backward import Mirror
from tests.support.engines import make_optimizer, scheduler


def planned(case: Case, settings: dict[str, Any], machines: int) -> Plan:
    """Return a plan in which everything travels, and whose updates wait."""
    found = replace(profile(case), machines=machines, common_updates=machines > 1)
    options = {"planner": "l2l", "accumulate": case.accumulate} | settings
    return solve(found, memory=found.hardware.context_bytes + (500 << 20), delayed=True, **options)


def trained(target: Target, case: Case, found: Plan, others: Mirror | None, *, iterations: bool) -> list[torch.Tensor]:
    """Return losses, weights and states; two halves of a loss in two processes are one in a process, bit for bit."""
    device = target.open(seed=0)
    model = case.build()
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    engine = Engine(model, optimizer, found, device, others=others)
    processes = 1 if others is None else others.size
    losses = []

    def micro_batch(step: int, part: int) -> None:
        made = {name: tensor.to(device.torch_device) for name, tensor in case.batch(step, 0, part).items()}
        loss = case.loss(model, made, processes)
        loss.backward()
        losses.append(loss.detach() * processes)

    try:
        engine.install()
        engine.clip_value = case.clip_value
        if not iterations:
            engine.follow(optimizer)
            engine.accumulate = case.accumulate
        for step in range(STEPS):
            for part in range(case.accumulate):
                last = part == case.accumulate - 1
                if not iterations:
                    micro_batch(step, part)
                    continue
                with engine.iteration(last=last):
                    micro_batch(step, part)
                    if last:
                        optimizer.step()
            if not iterations:
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        states: list[Any] = [value for p in model.parameters() for value in optimizer.state[p].values()]
        return [tensor.cpu().clone() for tensor in (*losses, *model.state_dict().values(), *states)]
    finally:
        engine.remove()
        device.close()


@pytest.mark.quick
@pytest.mark.parametrize("iterations", [True, False], ids=["iterations", "loop"])
@pytest.mark.parametrize("name", ["tight", "accumulated", "updated on the device"])
def test_they_come_back_complete(target: Target, name: str, iterations: bool) -> None:
    case, _, settings = PAIRS[name]
    both, others = planned(case, settings, machines=2), Mirror()
    expected = trained(target, case, planned(case, settings, machines=1), None, iterations=iterations)
    actual = trained(target, case, both, others, iterations=iterations)
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))
    reduced = [op.bytes for op in both.ops if op.kind == "reduce"]
    assert bool(reduced) == ("host" in both.update_places)
    assert others.sent == reduced * STEPS
    assert others.threads <= {"lt_offload network"}
