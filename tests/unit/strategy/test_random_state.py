"""Random states through a file that holds no code, and loaders that begin an epoch again with the same batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lt_offload.finetune.data.batches import Batches, ResumableLoader
from lt_offload.strategy.checkpoint import random_state
from lt_offload.strategy.checkpoint.data_order import repeatable


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


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Augmented(Dataset[Tensor]):
    """Items that every generator has a part in, one of its own too."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random(), np.random.random(), torch.rand(()).item(), self.own.random()
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.rand(12)


MAKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(
        Augmented(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "sampler's generator": lambda: DataLoader(
        Augmented(), batch_size=2, sampler=RandomSampler(range(12), generator=torch.Generator().manual_seed(4))
    ),
    "with replacement": lambda: DataLoader(Augmented(), 2, sampler=WeightedRandomSampler([0.5, 2] * 6, 12)),
    "workers": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2),
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
}


def seed(value: int) -> None:
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(value)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_rest_of_an_epoch_is_the_same(maker: str) -> None:
    seed(1)
    loader: Any = repeatable(MAKERS[maker]())
    list(loader)  # an epoch that is over
    loader.forget()
    batches = iter(loader)
    seen = [next(batches) for _ in range(2)]
    state = loader.state_dict()
    rest = list(batches)

    seed(99)
    resumed: Any = repeatable(MAKERS[maker]())
    resumed.load_state_dict(state)
    again = iter(resumed)
    assert all(torch.equal(next(again), batch) for batch in seen)
    assert all(torch.equal(left, right) for left, right in zip(again, rest, strict=True))
    assert len(rest) == 4


def test_a_loader_that_keeps_its_place_is_left_alone() -> None:
    loader: Any = ResumableLoader(Batches(stretches=lambda _: iter(()), collate=list, batch_size=2, seed=0, count=4))
    assert repeatable(loader) is loader
