"""Objects around a training step are, after training, what plain Lightning leaves.

The first step counts, and where one runs aside for the profile, it is undone.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers.activations import ACT2FN

from lt_offload import OffmateStrategy, micro_batched_reference
from lt_offload.errors import UnsupportedError
from lt_offload.model.objects import is_library
from tests.support.trainers import Forced, Module, Tokens, differences, fit


class Drawing(Dataset[dict[str, Tensor]]):
    """Replaces a token by one that its own generators draw, and counts."""

    def __init__(self, rows: Tokens) -> None:
        self.rows, self.calls = rows, 0
        self.torch, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.calls += 1
        row = {name: tensor.clone() for name, tensor in self.rows[index].items()}
        row["input_ids"][0] = 3 + torch.randint(90, (), generator=self.torch)
        row["input_ids"][1] = 3 + self.numpy.integers(90)
        return row


class Collate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.calls += 1
        return torch.utils.data.default_collate(rows)


class Weighting:
    """A plain object that the module holds: the weight of the loss depends on how often it was asked."""

    def __init__(self) -> None:
        self.calls, self.history = 0, {"weights": [1.0]}
        self.own, self.total = random.Random(3), torch.zeros(())

    def __call__(self, loss: Tensor) -> Tensor:
        self.calls += 1
        self.history["weights"].append(1 / self.calls + self.own.random())
        self.total.add_(loss.detach())
        return loss * self.history["weights"][-1]


class Held(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weighting, self.collate, self.made = Weighting(), Collate(), 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.weighting(self.model(**batch).loss)
        self.losses.append(loss.detach().clone())
        if self.logger is not None:
            self.logger.log_metrics({"weight": self.weighting.history["weights"][-1]}, step=self.weighting.calls)
        return loss

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        self.made += 1
        self.data = Drawing(Tokens(self.model, 6, 0))
        return DataLoader(self.data, batch_size=self.batch_size, collate_fn=self.collate, shuffle=True)

    def held(self) -> Any:
        states = self.data.torch.get_state().tolist(), self.data.numpy.bit_generator.state
        weighting = self.weighting
        counts = self.data.calls, self.collate.calls, self.made, weighting.calls
        return states, counts, weighting.history, weighting.own.getstate(), weighting.total.item()


class HeldAndNamed(Held):
    """Says which batch is to be measured, so that a step runs aside for that."""

    def worst_case_batch(self) -> dict[str, Tensor]:
        return torch.utils.data.default_collate(Tokens(self.model, 2, 0).rows)


def trained(strategy: Any, folder: Path, kind: type[Held] = Held, **options: Any) -> Any:
    L.seed_everything(7, verbose=False)
    return fit(strategy, kind(**options), logger=CSVLogger(folder), log_every_n_steps=1)


def logged(folder: Path) -> list[str]:
    """What the training step itself gave to the logger."""
    (path,) = folder.glob("**/metrics.csv")
    with path.open() as file:
        return [row["weight"] for row in csv.DictReader(file) if row["weight"]]


@pytest.mark.parametrize("kind", ["forced", "planned", "named batch", "chosen size"])
def test_data_collate_and_held_objects_are_as_in_plain_training(tmp_path: Path, kind: str) -> None:
    if kind == "forced":
        strategy: OffmateStrategy = Forced()
    elif kind != "chosen size":
        strategy = OffmateStrategy(memory="300kB")
    else:
        strategy = OffmateStrategy(memory="100MB", batch_size="auto")
    held = HeldAndNamed if kind == "named batch" else Held
    run = trained(strategy, tmp_path / "offmate", held)
    plain = trained("auto", tmp_path / "plain", held, batch_size=run.module.batch_size)
    assert differences(plain, run) == []
    assert run.module.held() == plain.module.held()
    assert logged(tmp_path / "offmate") == logged(tmp_path / "plain")


class Advancing(Module):
    """Holds what only goes forward: to run its step once more would take a number away from training."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.schedule = (0.5**i for i in range(100))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * next(self.schedule)


class Named(Advancing):
    """Says which batch is to be measured, a larger one than the first, so that its step runs once more for that."""

    def worst_case_batch(self) -> dict[str, Tensor]:
        first = next(iter(self.train_dataloader()))
        return {name: torch.cat([tensor, tensor]) for name, tensor in first.items()}


@pytest.mark.parametrize("options", [{}, {"memory": "300kB"}, {"memory": "600kB", "micro_batches": 2}])
def test_what_cannot_be_undone_need_not_be(options: dict[str, Any]) -> None:
    """The first step runs once and counts."""
    module = seeded(Advancing)
    with micro_batched_reference(module.model, options.get("micro_batches", 1)):
        plain = fit("auto", module)
    ours = fit(OffmateStrategy(**options) if "memory" in options else Forced(**options), seeded(Advancing))
    assert differences(plain, ours) == []
    assert next(ours.module.schedule) == 0.5 ** len(plain.module.losses)


def test_of_a_step_that_runs_aside_it_is_named_before_training() -> None:
    with pytest.raises(UnsupportedError, match=r"Named\.schedule changes when the training step runs"):
        fit(Forced(), seeded(Named))


class Gated(Module):
    """Looks its activation up in a table of transformers, which makes an object of the class that it holds."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.gate(super().training_step(batch, batch_idx))

    def gate(self, x: Tensor) -> Tensor:
        return ACT2FN["gelu"](x)


def in_libraries() -> dict[str, list[int]]:
    """What the dictionaries of own kinds hold that are global variables of libraries, those that count aside."""
    return {
        f"{name}.{variable}": [*map(id, dict.keys(held)), *map(id, dict.values(held))]
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and is_library(name)
        for variable, held in list(vars(module).items())
        if issubclass(type(held), dict) and type(held) is not dict and {*map(type, dict.values(held))} != {int}
    }


def test_tables_of_libraries_hold_what_they_held() -> None:
    plain, before = fit("auto", seeded(Gated)), in_libraries()
    assert len(before) > 100
    ours = fit(OffmateStrategy(memory="300kB"), seeded(Gated))
    after = in_libraries()
    assert [name for name in before if after.get(name, before[name]) != before[name]] == []
    assert differences(plain, ours) == []


def seeded(make: type[Module]) -> Module:
    L.seed_everything(7, verbose=False)
    return make()
