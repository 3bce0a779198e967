"""What every comparison with stock Lightning here has: a hostile device, and no waiting for measurements of lanes."""

from __future__ import annotations

import pytest

from lt_offload.execute import installed
from lt_offload.schema.profile import Contention
from tests.support.hostile.device import HostileDevice


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tasks as late as possible, overwrite freed memory and check the order of every access."""
    monkeypatch.setattr(installed, "open_device", lambda budget, *_, **__: HostileDevice(budget, "lazy", check=True))


@pytest.fixture(autouse=True)
def _uncontended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as if lanes did not slow each other down: to measure that takes longer than all else here."""
    monkeypatch.setattr("lt_offload.profiling.machine.measure_contention", lambda *_, **__: Contention())
