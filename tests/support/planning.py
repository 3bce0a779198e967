"""Plans that are made once for what differs in measured times only: for tests of what plans compute.

Times are other ones with every measurement, and to plan takes as long as to train a tiny model. A plan that fits fits
whatever the times are.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import pytest

from lt_offload.plan import Settings, make_plan
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile

PLACES = ("lt_offload.plan.solve", "lt_offload.strategy.offmate", "lt_offload.session")
"""Who plans: all but those who correct a plan by what they have measured."""
_plans: dict[Any, Plan] = {}


def plan_once(patch: pytest.MonkeyPatch) -> None:
    """Let everybody plan so while ``patch`` is in place."""
    for place in PLACES:
        patch.setattr(import_module(place), "make_plan", known_plan)


def known_plan(profile: Profile, settings: Settings, **options: Any) -> Plan:
    """Return the plan for ``profile``, or one that was made for other times."""
    key = _without_times(profile), settings, *sorted(options.items())
    if key not in _plans:
        _plans[key] = make_plan(profile, settings, **options)
    return _plans[key]


def _without_times(value: Any) -> Any:
    if is_dataclass(value):
        return tuple(_without_times(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, (tuple, list)):
        return tuple(map(_without_times, value))
    if isinstance(value, dict):
        return tuple((name, _without_times(held)) for name, held in value.items())
    return None if isinstance(value, float) else value
