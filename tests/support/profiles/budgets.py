"""Budgets that plans of tests are made for, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import lt_offload
from lt_offload import Plan, Profile
from lt_offload.errors import InfeasibleError

BUDGETS = {"tight": 1.02, "middle": 1.6, "resident": 20.0, "recomputing": 1.02}
"""Shares of the memory that training takes at least. Under the last one nothing of a block's activations leaves the
device, so that blocks run twice: where they may be offloaded, tight plans of small models do that with all."""


def planning(budget: str) -> dict[str, Any]:
    """Settings of the planner, as strategies and ``solve`` take them."""
    return {"planner": "resident" if budget == "resident" else "auto", "activation_offload": budget != "recomputing"}


def smallest(profile: Profile, budget: str, **settings: Any) -> int:
    """The memory that training takes at least under the settings of a budget, and others of the planner's."""
    return least(profile, **planning(budget) | {"planner": "auto"} | settings)


def least(profile: Profile, **settings: Any) -> int:
    """The memory that training takes at least under settings of the planner."""
    return named_by(lambda: lt_offload.solve(profile, memory=1000, **settings))


def named_by(run: Callable[[], object]) -> int:
    """The memory that is named by the error of a run in too little."""
    with pytest.raises(InfeasibleError) as caught:
        run()
    assert caught.value.needed_bytes is not None
    return caught.value.needed_bytes


def planned(profile: Profile, budget: str, **settings: Any) -> Plan:
    """A plan for a budget."""
    memory = int(smallest(profile, budget, **settings) * BUDGETS[budget])
    return lt_offload.solve(profile, memory=memory, **planning(budget) | settings)
