from __future__ import annotations

import functools

import pytest

from lt_offload.profile import measure
from lt_offload.profile.hardware import measure_hardware
from lt_offload.profile.types import HardwareProfile


@functools.cache
def hardware() -> HardwareProfile:
    return measure_hardware("cpu")


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine once: that is most of a tiny model's profile."""
    monkeypatch.setattr(measure, "measure_hardware", lambda *args, **kwargs: hardware())
