"""Plain PyTorch against the engine: loss, weights and states are equal bit for bit, with masters and noise, too."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lt_offload import AdamW
from tests import sampling
from tests.support import engines
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


def drawn(axes: dict[str, list[Any]], count: int, seed: int) -> list[Case]:
    """A seeded sample of the product of ``axes``; every value of every axis occurs."""
    rng = random.Random(seed)
    columns = {axis: [values[i % len(values)] for i in range(count)] for axis, values in axes.items()}
    for column in columns.values():
        rng.shuffle(column)
    return [Case(**{axis: column[i] for axis, column in columns.items()}, seed=i) for i in range(count)]


def sample(count: int) -> list[Case]:
    axes: dict[str, list[Any]] = {
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
        "tile_tokens": [None, 5],
    }
    return drawn(axes, count, SEED)


@pytest.mark.parametrize("case", sample(480 if sampling.FULL else 24), ids=str)
def test_equal_to_plain_pytorch(case: Case) -> None:
    expected = plain(case)
    actual = offloaded(case)
    assert differences(expected, actual) == []
    assert changed(case, actual)


# -- bfloat16 weights with fp32 masters, or rounded with noise ---------------------------------------------------------


NAME = "adamw-masters"
NOISY = "adamw-noisy"


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.OPTIMIZERS, NAME, lambda groups: AdamW(groups, lr=1e-3))
    monkeypatch.setitem(engines.OPTIMIZERS, NOISY, lambda groups: AdamW(groups, lr=1e-3, stochastic_rounding=True))


@pytest.mark.parametrize("places", [("host",), ("device",), ("paged",), ("device", "paged", "host")], ids="-".join)
@pytest.mark.parametrize("mode", ["lazy", "random", "thread"])
def test_masters_equal_plain_pytorch(places: tuple[str, ...], mode: str) -> None:
    case = Case(places=places, mode=mode, dtype="bfloat16", optimizer=NAME, options=("keep", "recompute"))
    expected = plain(case)
    actual = offloaded(case)
    assert differences(expected, actual) == []
    assert changed(case, actual)
    state: dict[str, Any] = next(iter(actual.optimizer.state.values()))
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)
    masters = [(p, s["master"]) for p, s in actual.optimizer.state.items()]
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in masters)
    assert not all(torch.equal(p.float(), master) for p, master in masters), "masters that hold no more than weights"


@pytest.mark.parametrize("places", [("host",), ("device",), ("paged",), ("device", "paged", "host")], ids="-".join)
def test_noise_equals_plain_pytorch(places: tuple[str, ...]) -> None:
    case = Case(places=places, mode="lazy", dtype="bfloat16", optimizer=NOISY, options=("keep", "recompute"))
    expected = plain(case)
    actual = offloaded(case)
    assert differences(expected, actual) == []
    assert changed(case, actual)
    assert all("master" not in state for state in actual.optimizer.state.values())
    assert differences(expected, plain(replace(case, optimizer=NAME))) != []
