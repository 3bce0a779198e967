from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lt_offload.schema.profile import Profile
from tests.gpu.target import Target
from tests.gpu.users.runs import Bench
from tests.support import trainers
from tests.support.trainers import profiled


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure and plan the same run only once: for tests of what comes afterwards."""
    trainers.measured_once(monkeypatch)


@pytest.fixture
def bench(target: Target, monkeypatch: pytest.MonkeyPatch) -> Bench:
    profiles: list[Profile] = []

    def noted(measure: Callable[[], Profile], _: Any) -> Profile:
        profiles.append(measure())
        return profiles[-1]

    profiled(monkeypatch, noted)
    return Bench(target=target, profiles=profiles)
