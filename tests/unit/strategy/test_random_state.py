"""Random states: global and held by objects, through a file that holds no code."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lt_offload.strategy.checkpoint import random_state


def through_a_file(value: Any, folder: Path) -> Any:
    torch.save(value, folder / "states.pt")
    return torch.load(folder / "states.pt", weights_only=True)


def draw() -> tuple[float, ...]:
    return (
        random.gauss(0, 1),
        np.random.standard_normal(),
        torch.randn(()).item(),
        random.random(),
        torch.rand(()).item(),
    )


def test_global_generators_go_on(tmp_path: Path) -> None:
    draw()  # so that each holds half of a pair of gaussians
    states = through_a_file(random_state.capture(random_state.generators({})), tmp_path)
    first = [draw() for _ in range(3)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    assert draw() != first[0]
    assert random_state.restore(random_state.generators({}), states) == []
    assert [draw() for _ in range(3)] == first


def owner() -> SimpleNamespace:
    return SimpleNamespace(
        torch=torch.Generator().manual_seed(1),
        pcg=np.random.default_rng(2),
        mersenne=np.random.Generator(np.random.MT19937(3)),
        legacy=np.random.RandomState(4),
        python=random.Random(5),
        name="no generator",
    )


def drawn(held: SimpleNamespace) -> list[float]:
    own = torch.rand((), generator=held.torch).item()
    return [own, held.pcg.random(), held.mersenne.random(), held.legacy.random(), held.python.random()]


def test_generators_of_objects_go_on(tmp_path: Path) -> None:
    first, second = owner(), owner()
    drawn(first)
    found = random_state.generators({"a": first, "b": None, "c": first.python})
    own = found.keys() - random_state.generators({}).keys()
    assert sorted(own) == ["a.legacy", "a.mersenne", "a.pcg", "a.python", "a.torch", "c"]
    states = through_a_file(random_state.capture(found), tmp_path)
    del states["a.pcg"]
    assert random_state.restore(random_state.generators({"a": second}), states) == ["a.pcg", "c"]
    later, other = drawn(first), drawn(second)
    assert (later[0], *later[2:]) == (other[0], *other[2:])
    assert later[1] != other[1]
