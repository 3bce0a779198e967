"""Taking a sample batch and a training step for the profile leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torchmetrics import MeanMetric

from lt_offload.errors import ConfigError
from lt_offload.strategy.first import sample

DATA = TensorDataset(torch.arange(20))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Grouped(BatchSampler):
    """Keeps a position, as samplers that can be resumed do."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(DATA, generator=generator()), 3, drop_last=False)
        self.position = 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            self.position += 1
            yield batch


class Doubling(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        raise AssertionError("rows are fetched together")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [2 * i for i in indices]


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        for i in range(10):
            self.given += 1
            yield i + 100


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, generator=generator())),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=Grouped()),
    "no batches": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "collate": lambda: DataLoader(
        DATA, batch_size=4, collate_fn=lambda rows: (torch.stack([r[0] for r in rows]) * 10,)
    ),
    "rows together": lambda: DataLoader(Doubling(), batch_size=4),
    "workers": lambda: DataLoader(DATA, batch_size=4, num_workers=2, persistent_workers=True),
    "batches": lambda: iter_once(),
}


def iter_once() -> Any:
    class Batches:
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.ones(2), torch.zeros(2)])

    return Batches()


def taken(loader: Any) -> Any:
    """What a Trainer with this loader plans for."""
    with torch.random.fork_rng(devices=[]):
        trainer = connected(Module(), loader=loader)
    return sample.from_data(trainer, sample.first_batch)


def flat(batch: Any) -> list[int]:
    return torch.utils._pytree.tree_leaves(torch.utils._pytree.tree_map(lambda t: t.tolist(), batch))


@pytest.mark.parametrize("name", LOADERS)
def test_the_first_batch_is_taken_without_advancing_anything(name: str) -> None:
    torch.manual_seed(5)
    loader = LOADERS[name]()
    before = torch.random.get_rng_state()
    sample = flat(taken(loader))
    torch.random.set_rng_state(before)  # the caller isolates the global generators
    epoch = [flat(batch) for batch in loader] if name != "workers" else [sample]
    torch.manual_seed(5)
    fresh = LOADERS[name]()
    undisturbed = [flat(batch) for batch in fresh] if name != "workers" else [sample]
    assert sample == undisturbed[0]
    assert epoch == undisturbed
    if name == "batch sampler":
        assert loader.batch_sampler.position == fresh.batch_sampler.position


def test_collections_of_loaders() -> None:
    both = taken({"a": LOADERS["in order"](), "b": [LOADERS["stream"]()]})
    assert flat(both) == [0, 1, 2, 3, 100, 101, 102]


def test_no_batch() -> None:
    with pytest.raises(ConfigError, match="has no batch"):
        taken(DataLoader(TensorDataset(torch.empty(0)), batch_size=2))


# -- through a Trainer ------------------------------------------------------------------------------------------------


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.metric = MeanMetric()
        self.seen: list[Tensor] = []
        self.count = 0
        self.names = {"a"}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", batch.sum())
        self.log_dict({"more": batch.sum()})
        self.metric.update(batch.sum())
        self.seen.append(batch)
        self.names.add("b")
        self.count += 1
        self.fresh = True
        return self.layer(batch).sum()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1


def connected(module: Any, datamodule: Any = None, loader: Any = None) -> L.Trainer:
    trainer = L.Trainer(strategy="offmate", accelerator="cpu", logger=False, precision="bf16-true")
    trainer._data_connector.attach_data(module, train_dataloaders=loader, datamodule=datamodule)
    trainer.strategy._lightning_module = module
    return trainer


def test_batches_go_the_way_they_go_in_training() -> None:
    trainer = connected(Module(), loader=DataLoader(torch.ones(4, 1), batch_size=2))
    batch = sample.SampleBatch.early(trainer).batch
    assert batch.dtype == torch.bfloat16
    assert torch.equal(batch, torch.full((2, 1), 2.0, dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_the_module_or_datamodule_may_name_the_largest_batch() -> None:
    class Data(L.LightningDataModule):
        def worst_case_batch(self) -> Tensor:
            return torch.full((3, 1), 4.0)

        def train_dataloader(self) -> None:
            pytest.fail("the loader was asked")

    assert sample.early_batch(connected(Module(), Data())).shape == (3, 1)

    class Own(Module):
        def sample_batch(self) -> Tensor:
            return torch.full((5, 1), 4.0)

    assert sample.early_batch(connected(Own(), Data())).shape == (5, 1)


def test_a_training_step_leaves_no_trace() -> None:
    module = Module()
    trainer = connected(module)
    before, metric = dict(module.__dict__), module.metric
    with sample.untouched(trainer):
        loss = sample._step(trainer.strategy, torch.ones(2, 1), 0)
        assert module.count == 1
        assert len(module.seen) == 1
    assert loss.requires_grad
    assert module.__dict__ == before
    assert (module.count, module.seen, module.names) == (0, [], {"a"})
    assert module.metric is metric
    assert metric.update_count == 0


def test_what_a_training_step_may_look_like() -> None:
    class Plain(Module):
        def training_step(self, batch: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": batch.sum(), "other": batch}

    assert sample._step(connected(Plain()).strategy, torch.ones(3), 0)["loss"] == 3

    class Nothing(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ConfigError, match=r"Nothing\.training_step returned NoneType.*must return the loss"):
        sample._step(connected(Nothing()).strategy, torch.ones(3), 0)
