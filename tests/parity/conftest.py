from __future__ import annotations

import pytest

from tests.support.planning import plan_once


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_once(monkeypatch)
