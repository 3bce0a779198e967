"""What a plan leaves free for evaluations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lt_offload.hf import planning


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
