from __future__ import annotations

from collections.abc import Iterator

import pytest

from lt_offload.execute import installed
from tests.support import trainers
from tests.support.hostile.device import HostileDevice


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tasks as late as possible, overwrite freed memory and check the order of every access."""
    monkeypatch.setattr(installed, "open_device", lambda budget, *_, **__: HostileDevice(budget, "lazy", check=True))


@pytest.fixture(scope="module")
def measured_once() -> Iterator[None]:
    """Measure and plan each kind of model once: for tests of what comes afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        trainers.measured_once(patch)
        yield
