"""What a plan leaves free for evaluations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_offload.hf import planning
from lt_offload.hf.run import Run
from lt_offload.model.batch import Size
from lt_offload.strategy.first.growing import Growth
from tests.support.samples import make_plan, make_profile


@pytest.mark.parametrize("aside", [False, True])
def test_a_batch_that_the_plan_has_no_room_for_leads_to_another(aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(rows: int, length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.ones(rows, length, dtype=torch.long)}

    known, larger = batch(2, 8), batch(2, 9)
    need = SimpleNamespace(device_peak_bytes=100, host_peak_bytes=1)
    running: Any = Run(SimpleNamespace(), SimpleNamespace(plan=None))  # type: ignore[arg-type]
    running.engine = SimpleNamespace(handover=SimpleNamespace(changed=lambda optimizer: None))
    running.plan = SimpleNamespace(predicted=need, budget_bytes=110, host_budget_bytes=10)
    running.optimizer, running._planned, running._aside, running._structure = None, known, aside, SimpleNamespace()
    running.growth.sizes = [Size.of(known)]
    planned: list[Any] = []

    def begin(batch: Any, why: str) -> Any:
        planned.append(batch)
        raise InterruptedError

    monkeypatch.setattr(running, "_plan_aside", lambda batch, why: planned.append(batch))
    monkeypatch.setattr(running, "_begin_survey", begin)

    def update(*coming: Any) -> None:
        running.expect(coming)
        for each in coming:
            with suppress(InterruptedError), running.step(each):
                pass

    update(known, batch(1, 8), batch(2, 3))
    assert not planned
    update(known, larger)
    assert planned == [larger]
    running.plan.budget_bytes = 200  # as much as twice the batch may need
    update(known, larger)
    assert planned == [larger]


def test_a_reserve_that_plans_eat_up_is_found_in_a_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a byte more in reserve each arena takes nearly as much more: what is lacking would shrink byte by byte."""
    monkeypatch.setattr(planning, "room_within", lambda budget, profile: budget - profile.shared_bytes)
    asked: list[int] = []

    def solve(memory: int, reserved: int) -> Any:
        asked.append(reserved)
        assert len(asked) < 100
        arena = memory - reserved - max(0, 10**6 - 1 - reserved)
        return SimpleNamespace(shared_bytes=reserved), SimpleNamespace(budget_bytes=memory, arena_bytes=arena)

    assert planning._reserve(solve, 10**8, 10**6) == 10**6
    assert 1 < len(asked) < 20


def test_a_plan_is_for_the_most_of_all_batches_that_have_shown_something() -> None:
    """A padded batch says nothing of a longer one without padding, nor both of a long one with it."""
    growth, profile, plan = Growth(), make_profile(), make_plan(make_profile())
    long, padded, both = Size(200, 20, False), Size(100, 10, True), Size(200, 20, True)
    first = growth.add(long, replace(profile, shared_bytes=7), profile)
    found = growth.add(padded, replace(profile, shared_bytes=5, slack_bytes=profile.slack_bytes + 3), first)
    assert (found.shared_bytes, found.slack_bytes) == (7, profile.slack_bytes + 3)
    sizes = iter([long, padded, both])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lt_offload.strategy.first.growing.shape", lambda batch: "one")
        patch.setattr(Size, "of", lambda batch, padded: next(sizes))
        assert [growth.outgrown(plan, None) is None for _ in range(3)] == [True, True, False]
    other = replace(profile, tensors=profile.tensors[:-1])
    assert growth.add(padded, other, found) is other
    assert growth.sizes == [padded]
