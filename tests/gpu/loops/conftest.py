from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.loops.bench import Bench
from tests.gpu.target import Target

PLANS: dict[Any, Any] = {}


@pytest.fixture
def bench(target: Target) -> Bench:
    return Bench(target=target, plans=PLANS)
