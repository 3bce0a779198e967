"""Plain PyTorch against the engine: loss, weights and optimizer state are equal bit for bit."""

from __future__ import annotations

import random

import pytest

from tests import sampling
from tests.support.engines import OPTIMIZERS, Case, changed, differences, offloaded, plain
from tests.support.models import FAMILIES

OPTIONS = [
    ("keep",),
    ("recompute",),
    ("offload",),
    ("mixed",),
    ("reload",),
    ("keep", "recompute", "offload", "mixed", "reload"),
]
PLACES = [("device",), ("paged",), ("host",), ("device", "paged", "host")]
SEED = 20240917


def sample(count: int) -> list[Case]:
    """A seeded sample of the product; every value of every axis occurs."""
    axes = {
        "family": list(FAMILIES),
        "options": OPTIONS,
        "places": PLACES,
        "mode": ["lazy", "random", "thread"],
        "dtype": ["float32", "bfloat16"],
        "dropout": [0.0, 0.1],
        "lora": [False, True],
        "optimizer": list(OPTIMIZERS),
        "lag": [0, 1],
        "lead": [0, 1],
    }
    rng = random.Random(SEED)
    columns = {}
    for axis, values in axes.items():
        column = [values[i % len(values)] for i in range(count)]
        rng.shuffle(column)
        columns[axis] = column
    return [Case(**{axis: columns[axis][i] for axis in axes}, seed=i) for i in range(count)]


@pytest.mark.parametrize("case", sample(480 if sampling.FULL else 24), ids=str)
def test_equal_to_plain_pytorch(case: Case) -> None:
    expected = plain(case)
    actual = offloaded(case)
    assert differences(expected, actual) == []
    assert changed(case, actual)
