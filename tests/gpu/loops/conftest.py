from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.loops.bench import Bench
from tests.gpu.target import Target


@pytest.fixture
def empty_device() -> Iterator[None]:
    """Begin with the device empty: what the test before has left in cycles is not this test's matter."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield
    gc.collect()


PLANS: dict[Any, Any] = {}


@pytest.fixture
def bench(target: Target) -> Bench:
    return Bench(target=target, plans=PLANS)
