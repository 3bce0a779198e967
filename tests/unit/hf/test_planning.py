"""What a plan leaves free for evaluations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_offload.hf import planning
from lt_offload.hf.run import Run
from lt_offload.model.batch import Size


def test_a_batch_that_the_plan_has_no_room_for_leads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(rows: int, length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.ones(rows, length, dtype=torch.long)}

    known, larger = batch(2, 8), batch(2, 9)
    running: Any = Run(SimpleNamespace(), SimpleNamespace(plan=None))  # type: ignore[arg-type]
    running.engine = SimpleNamespace(handover=SimpleNamespace(changed=lambda optimizer: None))
    running.plan, running.optimizer, running._planned, running._size = object(), None, known, Size.of(known)
    planned: list[Any] = []
    monkeypatch.setattr(running, "_plan_for", planned.append)
    running.expect([known, batch(1, 8), batch(2, 3)])
    assert not planned
    running.expect([known, larger])
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
