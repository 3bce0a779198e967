"""What every comparison with stock Lightning here has: a hostile device, and no waiting for measurements of lanes."""

from __future__ import annotations

import pytest

from lt_offload.schema.profile import Contention


@pytest.fixture(autouse=True)
def _uncontended(hostile: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as if lanes did not slow each other down: to measure that takes longer than all else here."""
    monkeypatch.setattr("lt_offload.profiling.machine.measure_contention", lambda *_, **__: Contention())
